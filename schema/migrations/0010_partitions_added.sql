-- When a topic gets more partitions, keys move: the partition of a key is its hash modulo their count. Until the jobs of
-- its group in the old origin are done, new ones must go there too (docs/decisions/0012-partitions-added.md).

-- The counts of before, oldest first; empty for a topic that has never grown.
ALTER TABLE sidings.topic ADD COLUMN former integer[] NOT NULL DEFAULT '{}';

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

-- What 0004_enqueue.sql describes, and:
--   origin      where the group has jobs already, if its topic has grown: from SQL nobody knows that in advance
--   unique_key  until the job ends, no other job of its type with this key is stored: the id returned is then that one's
--   policy      'serial', 'latest' (of the group's waiting jobs of this type only the newest runs) or 'parallel';
--               it has to be that of the type's handler
DROP FUNCTION sidings.enqueue(text, json, text, text, interval, timestamptz, integer, jsonb);
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
        WHEN NOT isfinite(run_at) THEN
            problem := format('the job %L would become due at %s', type, run_at);
            remedy := 'Give a time that comes.';
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
