"""Fixtures for all tests: real servers, as a user of Sidings would get them."""

pytest_plugins = ["sidings.devstack.fixtures"]
