-- runs with 0051
--
-- publish() and publish_bytes() refuse what can be no name of a topic, as the outbox of Python does. Each is written out
-- once more; what has changed stands above it.

-- As before, but not to a topic that Kafka cannot have: nothing could ever be sent there, which the caller learns at once.
-- It is mostly an argument in the place of another, such as a row's JSON.
CREATE OR REPLACE FUNCTION sidings.publish_bytes(topic text, key bytea, value bytea, headers json DEFAULT NULL,
                                                 partition_key bytea DEFAULT NULL, stamped_at timestamptz DEFAULT NULL)
RETURNS bigint
LANGUAGE plpgsql VOLATILE
AS $$
DECLARE
    published bigint;
BEGIN
    -- As a key of a column may have another collation, which counts for all the arguments, and knows no patterns.
    IF topic COLLATE "C" !~ '^[a-zA-Z0-9._-]{1,249}$' OR topic COLLATE "C" IN ('.', '..') THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
            MESSAGE = format('topic: %L is no name of a topic', left(topic, 100)),
            HINT = 'Give 1 to 249 letters, digits, ''.'', ''_'' and ''-''. The arguments are topic, key, value, headers, in this order.';
    END IF;
    INSERT INTO sidings.outbox (slot, topic, key, value, headers, partition_key, stamped_at)
    VALUES (sidings.outbox_slot($1, coalesce($5, $2)), $1, $2, $3, $4, $5, $6)
    RETURNING id INTO published;
    RETURN published;
END $$;

-- As before, but by the function above.
CREATE OR REPLACE FUNCTION sidings.publish(topic text, key text, value json, headers json DEFAULT NULL) RETURNS bigint
LANGUAGE sql VOLATILE
AS $$
    SELECT sidings.publish_bytes($1, convert_to($2, 'UTF8'), convert_to($3::text, 'UTF8'), $4)
$$;
