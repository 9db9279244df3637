-- The age of a transactional job counts from the arrival of its end, whatever that waits for, as in a cycle.
-- runs with 0019

-- As in 0007, but for statement_timestamp().
CREATE OR REPLACE FUNCTION sidings.finish(me uuid, its_origin text, its_epoch bigint, its_id bigint, its_attempt integer,
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
                statement_timestamp() - started_ago * interval '1 second', clock_timestamp(), me, ended.attempt, 'succeeded',
                ended.priority, ended.type, ended.origin, ended."group", ended.headers ->> 'correlation_id');
    END IF;
END $$;
