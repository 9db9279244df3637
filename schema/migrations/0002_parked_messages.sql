-- Is a message of this key parked? A consumer asks it for every key of every batch, so the answer must not depend on how
-- many jobs of other types wait in the key's group: an index of its own, which is empty while nothing is parked. Jobs of
-- other types cost it one comparison at their insert.
CREATE INDEX job_message ON sidings.job (origin, "group") WHERE position IS NOT NULL AND type LIKE 'message:%';

-- A function, because the question is asked on the connection of the service author's own statements: only here are
-- sequential scans switched off, which a plan made while the table was empty would choose, and keep.
CREATE FUNCTION sidings.parked(origins text[], groups text[]) RETURNS TABLE (origin text, "group" text)
LANGUAGE sql STABLE SET enable_seqscan = off AS $$
    SELECT k.origin, k."group"
    FROM unnest(origins, groups) AS k (origin, "group")
    WHERE EXISTS (SELECT FROM sidings.job j
                  WHERE j.origin = k.origin AND j."group" = k."group"
                    AND j.position IS NOT NULL AND j.type LIKE 'message:%')
$$;
