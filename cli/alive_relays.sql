-- How many relays are alive: they say so every second.
SELECT count(*) AS relays FROM sidings.outbox_relay r WHERE r.alive_until > clock_timestamp()
