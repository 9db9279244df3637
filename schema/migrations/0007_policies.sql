-- Policies, unique keys and blocked groups; failovers.

-- 0 serial, 1 latest, 2 parallel: sidings.jobs.Policy.
ALTER TABLE sidings.job ADD CONSTRAINT job_policy CHECK (policy BETWEEN 0 AND 2);

-- A key is taken until its job ends: the row is there until then, also while the job runs, backs off or is held. Partial:
-- jobs without a key pay nothing for it.
CREATE UNIQUE INDEX job_unique_key ON sidings.job (type, unique_key) WHERE unique_key IS NOT NULL;

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

-- What 0004_enqueue.sql describes, and:
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

-- The timeline that this server writes: the promotion of a standby begins a new one. Ids, attempts and cycle numbers of commits
-- that were lost with the former primary are handed out again there, so what was read on one timeline says nothing on another.
-- Fails on a standby.
CREATE FUNCTION sidings.timeline() RETURNS text
LANGUAGE sql VOLATILE AS $$ SELECT left(pg_walfile_name(pg_current_wal_insert_lsn()), 8) $$;

-- The end of a transactional handler: fence, then delete, the last thing before COMMIT (fencing first would block renewals for
-- as long as the handler runs). KEY SHARE conflicts with a takeover, not with a renewal; the caller sets a short
-- idle_in_transaction_session_timeout with it, so that a pause before its COMMIT ends in a rollback.
-- SD001: the origin has another owner or epoch, or the job was read from another timeline (null: it is not known).
-- SD002: this attempt is over already.
DROP FUNCTION sidings.finish(uuid, text, bigint, bigint, integer, float8, boolean);
CREATE FUNCTION sidings.finish(me uuid, its_origin text, its_epoch bigint, its_id bigint, its_attempt integer,
                               started_ago float8, keep_history boolean, its_timeline text DEFAULT NULL) RETURNS void
LANGUAGE plpgsql SET lock_timeout = '2s' SET enable_seqscan = off AS $$
DECLARE
    ended sidings.job;
BEGIN
    PERFORM 1 FROM sidings.origin o
    WHERE o.origin = its_origin AND o.owner = me AND o.epoch = its_epoch
    FOR KEY SHARE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'epoch % of origin % is superseded', its_epoch, its_origin USING ERRCODE = 'SD001';
    END IF;
    IF its_timeline <> sidings.timeline() THEN
        RAISE EXCEPTION 'attempt % of job % was read before a failover', its_attempt, its_id USING ERRCODE = 'SD001';
    END IF;
    DELETE FROM sidings.job j WHERE j.id = its_id AND j.attempt = its_attempt RETURNING j.* INTO ended;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'attempt % of job % is over already', its_attempt, its_id USING ERRCODE = 'SD002';
    END IF;
    IF keep_history THEN
        INSERT INTO sidings.job_history (job_id, epoch, enqueued_at, due_at, started_at, finished_at, executor, attempt,
                                         outcome, priority, type, origin, "group", correlation_id)
        VALUES (ended.id, its_epoch, ended.enqueued_at, ended.run_at,
                clock_timestamp() - started_ago * interval '1 second', clock_timestamp(), me, ended.attempt, 'succeeded',
                ended.priority, ended.type, ended.origin, ended."group", ended.headers ->> 'correlation_id');
    END IF;
END $$;
