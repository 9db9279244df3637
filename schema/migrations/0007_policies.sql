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
