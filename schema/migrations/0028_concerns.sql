-- What an action of a person concerned, for the executor whose fence it has bumped: only that has to be read anew there.
-- runs with 0019

-- fence: which the executor's was bumped to by the action's transaction. So an executor whose fence has grown knows of each number why; of
-- one that no row explains (a takeover, a pause, a function of an earlier release) it knows nothing, and reads everything anew.
ALTER TABLE sidings.audit ADD COLUMN executor uuid, ADD COLUMN fence bigint;
CREATE INDEX audit_fence ON sidings.audit (executor, fence) WHERE executor IS NOT NULL;

-- As in 0006, and: the actions that change nothing but what their target names, after intervene() in its origin. Not 'reset', whose target is
-- not all that it concerns; nor 'requeue', which has not intervened: the number would be another's.
CREATE OR REPLACE FUNCTION sidings.note_action(actor text, action text, target jsonb, reason text, detail jsonb DEFAULT NULL)
RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    e record;
BEGIN
    IF coalesce(actor, '') = '' THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value', MESSAGE = format('%s: nobody is named who does it', action),
            HINT = 'Give actor => ''the name of a person or program''.';
    END IF;
    SELECT x.id, x.fence INTO e FROM sidings.origin o JOIN sidings.executor x ON x.id = o.owner
    WHERE o.origin = target ->> 'origin'
          AND action IN ('cancel', 'discard', 'retry now', 'release', 'release group', 'skip head', 'clear group');
    INSERT INTO sidings.audit (actor, action, target, reason, detail, executor, fence)
    VALUES (actor, action, target, reason, detail, e.id, e.fence);
END $$;
