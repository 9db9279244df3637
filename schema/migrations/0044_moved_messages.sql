-- Messages of another topic, whose jobs now have the type of this one's, as after a rename (docs/operations.md).
-- runs with 0019

-- As in 0016, but: only those of the topic itself. A reset of the new topic cancelled the former one's, which nobody delivers again.
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
    WHERE m.type = 'message:' || its_topic AND p.payload ->> 'topic' = its_topic
$$;
