"""Directories: live replicas of compacted topics."""
