-- runs with 0051
--
-- The consumption of a topic can be paused. A table of its own, and no kind of sidings.pause: while that has a row, executors name
-- no job at once (executor/name_and_read.sql), and earlier releases would show a pause of nothing. These know nothing of this table:
-- their consumers go on.

-- Topics of which nothing more is handled.
CREATE TABLE sidings.topic_pause (
    paused_at timestamptz NOT NULL DEFAULT now(),
    topic     text NOT NULL,
    paused_by text NOT NULL,
    reason    text NOT NULL,
    CONSTRAINT topic_pause_pkey PRIMARY KEY (topic)
);

-- Whoever was given rights on all tables has them on this one: a service that is not the owner would stand, and nobody could look.
DO $$
DECLARE
    given record;
BEGIN
    FOR given IN
        SELECT g.privilege_type, CASE g.grantee WHEN 0 THEN 'PUBLIC' ELSE g.grantee::regrole::text END AS who
        FROM pg_class c, aclexplode(c.relacl) g WHERE c.oid = 'sidings.pause'::regclass AND g.grantee <> c.relowner
    LOOP
        EXECUTE format('GRANT %s ON sidings.topic_pause TO %s', given.privilege_type, given.who);
    END LOOP;
END $$;

-- Both actions begin with this. Of two at once the second sees what the first has done; consumers, which only read, do not wait.
CREATE FUNCTION sidings.take_topic(its_topic text) RETURNS void
LANGUAGE plpgsql SET lock_timeout = '2s' AS $$
BEGIN
    IF coalesce(its_topic, '') = '' THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value', MESSAGE = 'no topic is named', HINT = 'Give the topic''s name.';
    END IF;
    PERFORM sidings.begin_action();
    LOCK TABLE sidings.topic_pause IN SHARE ROW EXCLUSIVE MODE;
END $$;

-- No consumer takes up a further message of the topic; what is under way goes on, and what comes waits in Kafka. Consumers look
-- every second (kafka/load_resets.sql), and before they begin with a partition (kafka/load_offsets.sql).
CREATE FUNCTION sidings.pause_topic(topic text, actor text, reason text) RETURNS void
LANGUAGE plpgsql SET lock_timeout = '2s' AS $$
DECLARE
    standing record;
BEGIN
    IF coalesce(reason, '') = '' THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value', MESSAGE = 'a pause needs a reason',
            HINT = 'Give reason => ''…'': whoever wonders why nothing is handled will read it.';
    END IF;
    PERFORM sidings.take_topic(topic);
    SELECT p.* INTO standing FROM sidings.topic_pause p WHERE p.topic = pause_topic.topic;
    IF FOUND THEN
        RAISE EXCEPTION USING ERRCODE = 'SD004',
            MESSAGE = format('the topic %s is paused already, by %s since %s: %s', topic, standing.paused_by,
                             to_char(standing.paused_at, 'YYYY-MM-DD HH24:MI:SS OF'), standing.reason),
            HINT = 'Leave it, or resume it first.';
    END IF;
    PERFORM sidings.note_action(actor, 'pause', jsonb_build_object('topic', topic), reason);
    INSERT INTO sidings.topic_pause (topic, paused_by, reason) VALUES (topic, actor, reason);
END $$;

-- The end of a pause.
CREATE FUNCTION sidings.resume_topic(topic text, actor text, reason text DEFAULT NULL) RETURNS void
LANGUAGE plpgsql SET lock_timeout = '2s' AS $$
DECLARE
    ended record;
BEGIN
    PERFORM sidings.take_topic(topic);
    DELETE FROM sidings.topic_pause p WHERE p.topic = resume_topic.topic RETURNING p.* INTO ended;
    IF NOT FOUND THEN
        RAISE EXCEPTION USING ERRCODE = 'SD004', MESSAGE = format('the topic %s is not paused', topic),
            HINT = 'Look at the list of pauses.';
    END IF;
    PERFORM sidings.note_action(actor, 'resume', jsonb_build_object('topic', topic), reason,
                                jsonb_build_object('paused_by', ended.paused_by, 'paused_at', ended.paused_at,
                                                   'reason', ended.reason));
END $$;
