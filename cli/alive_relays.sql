-- How many relays are alive: they say so every second. One that does not reach Kafka says that it was a second ago (attend.sql), so
-- that the others take its share.
SELECT count(*) FILTER (WHERE r.alive_until > clock_timestamp()) AS relays,
       count(*) FILTER (WHERE r.alive_until BETWEEN clock_timestamp() - interval '5 seconds' AND clock_timestamp()) AS cut_off
FROM sidings.outbox_relay r
