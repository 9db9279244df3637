-- The row of an executor that holds origins is not deleted.
-- runs with 0019

-- It names what runs there: without it nobody could tell which attempts were lost with it, and the jobs ran again under the numbers of attempts
-- that had begun already. Costs the cycles nothing.
CREATE FUNCTION sidings.keep_executor() RETURNS trigger
LANGUAGE plpgsql AS $$
BEGIN
    IF EXISTS (SELECT FROM sidings.origin o WHERE o.owner = OLD.id) THEN
        RAISE EXCEPTION USING ERRCODE = 'SD004', MESSAGE = format('the executor %s holds origins: its row says what runs there', OLD.id),
            HINT = 'End its process; the origins of a dead one are taken over, and rows that are not needed any more go by themselves.';
    END IF;
    RETURN OLD;
END $$;
CREATE TRIGGER keep_executor BEFORE DELETE ON sidings.executor FOR EACH ROW EXECUTE FUNCTION sidings.keep_executor();
