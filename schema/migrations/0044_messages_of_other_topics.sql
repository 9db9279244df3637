-- A reset cancels what the topic delivers again, and nothing that another topic of its name has delivered, nor one of another name, whose
-- jobs now have the type of this one's, as after a rename (docs/operations.md).
-- runs with 0019

DROP FUNCTION sidings.stored_messages(text, text);

-- As in 0016, but: only those of the topic itself, by its name and, where a message tells and `its_id` is not null, by its id. Others nobody
-- delivers again.
CREATE FUNCTION sidings.stored_messages(its_topic text, its_origin text, its_id uuid)
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
    WHERE m.type = 'message:' || its_topic AND (p.payload ->> 'topic' = its_topic) IS NOT FALSE
      AND (p.payload ->> 'topic_id' = its_id::text) IS NOT FALSE
$$;

-- As in 0034, but for the id.
CREATE OR REPLACE FUNCTION sidings.reset_offsets(
    its_topic text, partitions integer[], offsets bigint[], actor text, reason text, topic_id uuid DEFAULT NULL,
    cuts bigint[] DEFAULT NULL)
RETURNS TABLE (its_partition integer, former bigint, cancelled bigint)
LANGUAGE plpgsql SET enable_seqscan = off SET lock_timeout = '5s' AS $$
DECLARE
    o       record;
    ids     bigint[];
    formers bigint[] := '{}';
    others  integer[] := '{}';  -- partitions whose offset belonged to another topic
    other   boolean;
    counts  bigint[] := '{}';
    taken   text;
    holder  record;
BEGIN
    FOR o IN SELECT r.partition, r.next FROM unnest(partitions, offsets) AS r (partition, next) ORDER BY r.partition
    LOOP
        SELECT c.next_offset, c.topic_id <> reset_offsets.topic_id INTO former, other FROM sidings.consumer_offset c
        WHERE c.topic = its_topic AND c.partition = o.partition FOR UPDATE;
        formers[o.partition] := former;
        counts[o.partition] := 0;
        IF other THEN
            others := others || o.partition;
        END IF;
        INSERT INTO sidings.consumer_offset AS c (topic, partition, next_offset, resets, topic_id)
        VALUES (its_topic, o.partition, o.next, 1, reset_offsets.topic_id)
        ON CONFLICT ON CONSTRAINT consumer_offset_pkey
        DO UPDATE SET next_offset = excluded.next_offset, resets = c.resets + 1, topic_id = excluded.topic_id,
                      leader_epoch = NULL;
    END LOOP;
    PERFORM sidings.stay_origin(n.origin) FROM (SELECT its_topic || '/' || p AS origin FROM unnest(partitions) p ORDER BY 1) n;
    FOR o IN
        WITH moved AS (
            SELECT r.partition, r.next, coalesce(r.cut, 9223372036854775807) AS until
            FROM unnest(partitions, offsets, cuts) AS r (partition, next, cut)
            WHERE r.partition <> ALL (others)
        ), origins AS (
            SELECT its_topic || '/' || n AS origin
            FROM generate_series(0, coalesce((SELECT t.partitions FROM sidings.topic t WHERE t.topic = its_topic), 0) - 1) n
        ), elsewhere AS (
            SELECT DISTINCT x.origin, v.partition, v.next, v.until
            FROM origins x CROSS JOIN LATERAL sidings.stored_messages(its_topic, x.origin, reset_offsets.topic_id) m
            JOIN moved v ON v.partition = m.partition AND m."offset" >= v.next AND m."offset" < v.until
        )
        SELECT its_topic || '/' || v.partition AS origin, v.partition, v.next, v.until FROM moved v
        UNION
        SELECT e.origin, e.partition, e.next, e.until FROM elsewhere e
        ORDER BY origin, partition
    LOOP
        IF o.origin IS DISTINCT FROM taken THEN
            holder := sidings.intervene_for_long(o.origin);
            taken := o.origin;
        END IF;
        ids := ARRAY(SELECT m.job FROM sidings.stored_messages(its_topic, o.origin, reset_offsets.topic_id) m
                     WHERE m.partition = o.partition AND m."offset" >= o.next AND m."offset" < o.until);
        -- In the order in which clear_group() and promotion lock them: where nobody holds the origin, no holder's row is waited for before.
        PERFORM 1 FROM sidings.job j WHERE j.id = ANY (ids) ORDER BY j.run_at, j.id FOR UPDATE;
        counts[o.partition] := counts[o.partition]
            + sidings.end_jobs(ids, 'cancelled', actor,
                               concat_ws(': ', 'the consumer was reset, the message is delivered again', reason),
                               holder.owner, holder.epoch, holder.running);
    END LOOP;
    FOR o IN SELECT r.partition, r.next FROM unnest(partitions, offsets) AS r (partition, next) ORDER BY r.partition
    LOOP
        its_partition := o.partition;
        former := formers[o.partition];
        cancelled := counts[o.partition];
        PERFORM sidings.note_action(actor, 'reset', jsonb_build_object('origin', its_topic || '/' || o.partition), reason,
                                    jsonb_build_object('from', former, 'to', o.next, 'cancelled', cancelled));
        RETURN NEXT;
    END LOOP;
END $$;
