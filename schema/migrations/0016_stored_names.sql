-- Messages that are stored as jobs are found by their offset whatever stands in them.

-- As in 0008, but for the NUL: a header's name may have one, json keeps it as \u0000, and ->> refuses such a document
-- altogether, whichever field is asked for. One such message kept the offsets of its whole partition from being reset.
-- The replacement is of the same form, so that an escaped backslash before u0000 stays an escaped backslash.
CREATE OR REPLACE FUNCTION sidings.stored_messages(its_topic text, its_origin text)
RETURNS TABLE (job bigint, partition integer, "offset" bigint)
LANGUAGE sql STABLE SET enable_seqscan = off AS $$
    SELECT m.id, (p.payload ->> 'partition')::integer, (p.payload ->> 'offset')::bigint
    FROM (SELECT j.id, j.type, j.payload FROM sidings.job j
          WHERE j.origin = its_origin AND j.position IS NOT NULL AND j.type LIKE 'message:%'
          UNION ALL
          SELECT j.id, j.type, j.payload FROM sidings.job j
          WHERE j.origin = its_origin AND j.position IS NULL AND j.held IS NULL
          UNION ALL
          SELECT j.id, j.type, j.payload FROM sidings.job j
          WHERE j.origin = its_origin AND j.held IS NOT NULL) m
    CROSS JOIN LATERAL (SELECT replace(m.payload::text, '\u0000', '\u0020')::json AS payload) p
    WHERE m.type = 'message:' || its_topic
$$;
