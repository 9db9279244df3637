-- A group that is cleared while some of its jobs end is cleared altogether.
-- runs with 0019

-- As in 0006, but: where jobs have ended that it has waited for, as superseded ones, it takes others for them.
CREATE OR REPLACE FUNCTION sidings.clear_group(origin text, "group" text, actor text, reason text DEFAULT NULL,
                                    running boolean DEFAULT false, most integer DEFAULT 10000) RETURNS bigint
LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off SET lock_timeout = '2s' AS $$
DECLARE
    i       record;
    ids     bigint[];
    spared  bigint[] := '{}';
    chosen  integer;
    cleared bigint := 0;
BEGIN
    SELECT * INTO i FROM sidings.intervene(origin);
    IF NOT running THEN
        spared := ARRAY(SELECT j.id FROM sidings.job j
                        WHERE j.id = ANY (i.running) AND j.origin = clear_group.origin AND j."group" = clear_group."group");
    END IF;
    LOOP
        ids := ARRAY(SELECT j.id FROM sidings.job j
                     WHERE j.origin = clear_group.origin AND j."group" = clear_group."group" AND j.held IS NULL
                       AND j.id <> ALL (spared)
                     ORDER BY j.position DESC NULLS FIRST LIMIT most - cleared);
        chosen := cardinality(ids);
        -- Locked in the order in which promotion locks delayed jobs, or the two could wait for each other.
        ids := ARRAY(SELECT k.id FROM (SELECT j.id FROM sidings.job j WHERE j.id = ANY (ids) AND j.held IS NULL
                                       ORDER BY j.run_at, j.id FOR UPDATE) k);
        cleared := cleared + sidings.end_jobs(ids, 'cancelled', actor, reason, i.owner, i.epoch, i.running);
        EXIT WHEN cardinality(ids) = chosen;   -- else some have ended meanwhile, and fewer than `most` would say that none is left
    END LOOP;
    IF cleared > 0 THEN
        PERFORM sidings.note_action(actor, 'clear group', jsonb_build_object('origin', origin, 'group', "group"), reason,
                                    jsonb_build_object('cancelled', cleared, 'running', running));
    END IF;
    RETURN cleared;
END $$;
