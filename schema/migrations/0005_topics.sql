-- Which partition a key belongs to: so that a job from an HTTP request, from SQL or from a message of another topic meets
-- the messages of its key in one origin. It works while Kafka is down: the partition counts are kept here, written by the
-- services that see the topics.
CREATE TABLE sidings.topic (
    topic       text NOT NULL,
    partitions  integer NOT NULL,
    partitioner text NOT NULL DEFAULT 'murmur2',
    seen_at     timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT topic_pkey PRIMARY KEY (topic),
    CONSTRAINT topic_partitions_positive CHECK (partitions > 0),
    CONSTRAINT topic_partitioner_known CHECK (partitioner IN ('murmur2', 'crc32'))
);

-- Kafka's own hash of keys (org.apache.kafka.common.utils.Utils.murmur2), as an unsigned number. Products of 32 bits
-- with the multiplier, which has 31, fit into bigint.
CREATE FUNCTION sidings.murmur2(data bytea) RETURNS bigint
LANGUAGE plpgsql IMMUTABLE STRICT PARALLEL SAFE AS $$
DECLARE
    m    constant bigint := 1540483477;    -- 0x5bd1e995
    low  constant bigint := 4294967295;    -- 32 bits
    size constant integer := length(data);
    rest constant integer := size % 4;
    h    bigint := 2538058380 # size;      -- 0x9747b28c
    k    bigint;
BEGIN
    FOR i IN 0 .. size - rest - 4 BY 4 LOOP
        k := get_byte(data, i) | (get_byte(data, i + 1) << 8) | (get_byte(data, i + 2) << 16)
             | (get_byte(data, i + 3)::bigint << 24);
        k := (k * m) & low;
        k := ((k # (k >> 24)) * m) & low;
        h := ((h * m) & low) # k;
    END LOOP;
    IF rest = 3 THEN
        h := h # (get_byte(data, size - 1)::bigint << 16);
    END IF;
    IF rest >= 2 THEN
        h := h # (get_byte(data, size - rest + 1)::bigint << 8);
    END IF;
    IF rest >= 1 THEN
        h := ((h # get_byte(data, size - rest)) * m) & low;
    END IF;
    h := ((h # (h >> 13)) * m) & low;
    RETURN h # (h >> 15);
END $$;

-- CRC-32 as in zlib, half a byte at a time. (Postgres has it built in from 18 on.)
CREATE FUNCTION sidings.crc32(data bytea) RETURNS bigint
LANGUAGE plpgsql IMMUTABLE STRICT PARALLEL SAFE AS $$
DECLARE
    t constant bigint[] := '{0,498536548,997073096,651767980,1994146192,1802195444,1303535960,1342533948,3988292384,4027552580,
                             3604390888,3412177804,2607071920,2262029012,2685067896,3183342108}';
    c bigint := 4294967295;
BEGIN
    FOR i IN 0 .. length(data) - 1 LOOP
        c := c # get_byte(data, i);
        c := (c >> 4) # t[(c & 15) + 1];
        c := (c >> 4) # t[(c & 15) + 1];
    END LOOP;
    RETURN c # 4294967295;
END $$;

-- The partition that a producer chooses for a key.
--   partitioner   'murmur2': Java's default, aiokafka's, kafka-python's, murmur2 and murmur2_random of librdkafka
--                 'crc32': consistent and consistent_random of librdkafka, the latter its default
CREATE FUNCTION sidings.partition_for(key bytea, partitions integer, partitioner text DEFAULT 'murmur2') RETURNS integer
LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE
RETURN CASE partitioner WHEN 'murmur2' THEN (sidings.murmur2(key) & 2147483647) % partitions
                        WHEN 'crc32' THEN sidings.crc32(key) % partitions END;

-- The origin of a key, or null where the topic's partitions are not known yet.
CREATE FUNCTION sidings.known_origin(key text, topic text) RETURNS text
LANGUAGE sql STABLE STRICT PARALLEL SAFE AS $$
    SELECT t.topic || '/' || sidings.partition_for(convert_to($1, 'UTF8'), t.partitions, t.partitioner)
    FROM sidings.topic t WHERE t.topic = $2
$$;

-- The origin of a key, 'topic/partition'; for the origin of sidings.enqueue().
CREATE FUNCTION sidings.origin_for(key text, topic text) RETURNS text
LANGUAGE plpgsql STABLE PARALLEL SAFE AS $$
DECLARE
    found_origin text := sidings.known_origin(key, topic);
BEGIN
    IF key IS NULL OR topic IS NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value', MESSAGE = 'origin_for needs a key and a topic',
            HINT = 'Give the key of the entity''s messages, and the topic that they are in.';
    ELSIF found_origin IS NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
            MESSAGE = format('the partitions of the topic %L are not known yet', topic),
            HINT = 'Start a service that consumes it, or names it in topics=, once while Kafka is up; or insert its row into sidings.topic.';
    END IF;
    RETURN found_origin;
END $$;
