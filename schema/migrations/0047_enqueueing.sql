-- Storing jobs: from SQL, under a unique key, and in the partition of their key.

-- Which partition a key belongs to: so that a job from an HTTP request, from SQL or from a message of another topic meets
-- the messages of its key in one origin. It works while Kafka is down: the partition counts are kept here, written by the
-- services that see the topics.
--
-- When a topic gets more partitions, keys move: the partition of a key is its hash modulo their count. Until the jobs of
-- its group in the old origin are done, new ones must go there too (docs/decisions/0012-partitions-added.md).
CREATE TABLE sidings.topic (
    topic       text NOT NULL,
    partitions  integer NOT NULL,
    partitioner text NOT NULL DEFAULT 'murmur2',
    seen_at     timestamptz NOT NULL DEFAULT now(),
    former      integer[] NOT NULL DEFAULT '{}',     -- the counts of before, oldest first; empty: it has never grown
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

-- Where a job that was to go to `origin` belongs. In a topic that has grown: to the origin in which its group has jobs
-- already, among all those that the key has ever had; that is `origin` itself where it has some there. So a group stays
-- where it is until it is empty. Delayed and held jobs count: they too come into the order of their origin one day.
--
-- key: of the message; null: the group stands for it. Where `origin` is none of the key's (its producer chose the partition
-- in another way, or the group is no key), the job goes to `origin`.
--
-- VOLATILE, so that it sees what is committed at the moment of its call, under READ COMMITTED, and what the calling
-- statement has inserted so far. Index: job_group; sequential scans are off for the reason given at sidings.parked.
CREATE FUNCTION sidings.place(origin text, "group" text, key bytea DEFAULT NULL) RETURNS text
LANGUAGE plpgsql VOLATILE SET enable_seqscan = off AS $$
DECLARE
    grown sidings.topic;
    hash  bigint;
    own   text[];
    other text;
BEGIN
    IF "group" IS NULL THEN
        RETURN origin;
    END IF;
    SELECT * INTO grown FROM sidings.topic t WHERE t.topic = split_part(origin, '/', 1) AND t.former <> '{}';
    IF NOT FOUND
       OR EXISTS (SELECT FROM sidings.job j WHERE j.origin = place.origin AND j."group" = place."group") THEN
        RETURN origin;
    END IF;
    key := coalesce(key, convert_to("group", 'UTF8'));
    hash := CASE grown.partitioner WHEN 'murmur2' THEN sidings.murmur2(key) & 2147483647 ELSE sidings.crc32(key) END;
    own := ARRAY(SELECT grown.topic || '/' || hash % n FROM unnest(grown.former || grown.partitions) n);
    IF origin = ANY (own) THEN
        FOREACH other IN ARRAY own LOOP
            IF EXISTS (SELECT FROM sidings.job j WHERE j.origin = other AND j."group" = place."group") THEN
                RETURN other;
            END IF;
        END LOOP;
    END IF;
    RETURN origin;
END $$;

-- Where a job of this group belongs among the partitions of its home, or null where these are not known yet.
CREATE FUNCTION sidings.home_origin("group" text, topic text) RETURNS text
LANGUAGE sql VOLATILE AS $$
    SELECT CASE WHEN t.former = '{}' THEN o.origin ELSE sidings.place(o.origin, $1) END
    FROM sidings.topic t,
         LATERAL (SELECT t.topic || '/' || sidings.partition_for(convert_to($1, 'UTF8'), t.partitions, t.partitioner)) o (origin)
    WHERE t.topic = $2
$$;

-- One job, unless another one of its type has the key: then that one's id and origin. An enqueue of the same key whose
-- transaction is still open is waited for. The row that stands is not locked: that would stall its executor's cycle.
-- plpgsql, because each statement of it has a snapshot of its own: what ON CONFLICT has met is not in its statement's.
CREATE FUNCTION sidings.insert_unique(its_type text, its_origin text, its_group text, its_priority integer,
                                      its_run_at timestamptz, its_headers jsonb, its_payload json, its_policy integer,
                                      its_key text) RETURNS TABLE (id bigint, origin text)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
    LOOP
        RETURN QUERY
            INSERT INTO sidings.job (type, origin, "group", priority, run_at, headers, payload, policy, unique_key, position)
            VALUES (its_type, its_origin, its_group, its_priority, its_run_at, its_headers, its_payload, its_policy, its_key,
                    CASE WHEN its_run_at IS NULL AND pg_current_xact_id() IS NOT NULL
                         THEN nextval('sidings.job_position') END)
            ON CONFLICT (type, unique_key) WHERE unique_key IS NOT NULL DO NOTHING
            RETURNING job.id, job.origin;
        EXIT WHEN FOUND;
        RETURN QUERY SELECT j.id, j.origin FROM sidings.job j WHERE j.type = its_type AND j.unique_key = its_key;
        EXIT WHEN FOUND;   -- else it has ended meanwhile, and the key is free
    END LOOP;
END $$;

-- `SELECT sidings.enqueue(…)`: jobs from SQL, from triggers and from other languages.
--
-- The job exists if and only if the transaction of the call commits; a single statement is its own transaction. It is
-- what jobs/insert_job.sql stores, under the same rules: the transaction id is taken before the position, and a delayed
-- job gets no position. The payload is checked by its type's model only when the job runs; one that does not fit is held.
--
--   type        of the job: the name of its handler
--   payload     json; a row_to_json(NEW), a json_build_object(…)
--   origin      'topic/partition'. If its topic has grown, the job goes where the group has jobs already: from SQL nobody
--               knows that in advance
--   "group"     jobs of one origin and group run one at a time, in order; null: the job stands alone
--   delay       interval, at most 366 days; or run_at, the time when it becomes due
--   priority    -100 to 100, larger first, between groups only
--   headers     a jsonb object of texts, e.g. {"correlation_id": "…"}
--   unique_key  until the job ends, no other job of its type with this key is stored: the id returned is then that one's
--   policy      'serial', 'latest' (of the group's waiting jobs of this type only the newest runs) or 'parallel';
--               it has to be that of the type's handler
--
-- Returns the job's id. What cannot be stored is refused with SQLSTATE 22023 and a hint; nothing is written then.
CREATE FUNCTION sidings.enqueue(
    type       text,
    payload    json,
    origin     text,
    "group"    text DEFAULT NULL,
    delay      interval DEFAULT NULL,
    run_at     timestamptz DEFAULT NULL,
    priority   integer DEFAULT 0,
    headers    jsonb DEFAULT NULL,
    unique_key text DEFAULT NULL,
    policy     text DEFAULT 'serial'
) RETURNS bigint
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    problem text;
    remedy  text;
    due     timestamptz;
    number  integer := array_position('{serial,latest,parallel}'::text[], policy) - 1;
    new_id  bigint;
BEGIN
    origin := sidings.place(origin, "group");
    CASE
        WHEN type IS NULL OR type = '' THEN
            problem := 'the job has no type';
            remedy := 'Give the name of its handler, e.g. ''send_eta''.';
        WHEN origin IS NULL OR origin = '' THEN
            problem := format('the job %L needs an origin', type);
            remedy := 'Give origin => ''topic/partition'', the Kafka partition of the entity''s key.';
        WHEN "group" = '' THEN
            problem := format('the group of the job %L is empty', type);
            remedy := 'Give the key of its entity, or NULL for a job that stands alone.';
        WHEN strpos(concat(type, origin, "group", unique_key), chr(31)) > 0 THEN
            problem := format('type, origin, group or unique_key of the job %L holds a control character that cannot be stored (U+001F)', type);
            remedy := 'Remove it.';
        WHEN octet_length(type) > 1000 OR octet_length(origin) > 1000 OR octet_length("group") > 1000
             OR octet_length(unique_key) > 1000 THEN
            problem := format('type, origin, group or unique_key of the job %L is longer than 1000 bytes', left(type, 40));
            remedy := 'Use a shorter name, e.g. a hash of it: an index entry has to fit.';
        WHEN delay IS NOT NULL AND run_at IS NOT NULL THEN
            problem := format('the job %L has both delay and run_at', type);
            remedy := 'Give one of them.';
        WHEN delay < interval '0' OR delay > interval '366 days' THEN
            problem := format('the delay of the job %L is %s', type, delay);
            remedy := 'Give between 0 and 366 days, or use run_at.';
        WHEN run_at NOT BETWEEN '0001-01-01 00:00:00+00' AND '9999-12-31 23:59:59.999999+00' THEN
            problem := format('run_at: the job %L would become due at %s', type, run_at);
            remedy := 'Give a time from the year 1 to the year 9999 (in UTC): Python has no others.';
        WHEN priority IS NULL OR priority NOT BETWEEN -100 AND 100 THEN
            problem := format('the priority of the job %L is %s', type, coalesce(priority::text, 'NULL'));
            remedy := 'Give a whole number from -100 to 100.';
        WHEN jsonb_typeof(headers) <> 'object' OR jsonb_path_exists(headers, '$.* ? (@.type() != "string")') THEN
            problem := format('the headers of the job %L are not an object of texts', type);
            remedy := 'Give e.g. jsonb_build_object(''correlation_id'', …).';
        WHEN number IS NULL THEN
            problem := format('the policy of the job %L is %L', type, policy);
            remedy := 'Give ''serial'', ''latest'' or ''parallel'', as its type is declared.';
        WHEN number = 1 AND "group" IS NULL THEN
            problem := format('the job %L has the policy ''latest'' and no group', type);
            remedy := 'Give the key of its entity: the newest job of a group runs.';
        WHEN unique_key = '' THEN
            problem := format('the unique_key of the job %L is empty', type);
            remedy := 'Give what must not be there twice, or NULL.';
        WHEN unique_key IS NOT NULL THEN
            due := coalesce(run_at, clock_timestamp() + nullif(delay, interval '0'));
            SELECT u.id INTO new_id
            FROM sidings.insert_unique(type, origin, "group", priority, due, headers, payload, number, unique_key) u;
            RETURN new_id;
        ELSE
            due := coalesce(run_at, clock_timestamp() + nullif(delay, interval '0'));
            INSERT INTO sidings.job (type, origin, "group", priority, run_at, headers, payload, policy, position)
            VALUES (enqueue.type, enqueue.origin, enqueue."group", enqueue.priority, due, enqueue.headers, enqueue.payload, number,
                    CASE WHEN due IS NULL AND pg_current_xact_id() IS NOT NULL THEN nextval('sidings.job_position') END)
            RETURNING job.id INTO new_id;
            RETURN new_id;
    END CASE;
    RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value', MESSAGE = problem, HINT = remedy;
END $$;
