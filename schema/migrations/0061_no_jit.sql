-- runs with 0051
--
-- Functions that rule out sequential scans do without compiled expressions, too. Up to Postgres 17 a scan that is ruled out and
-- takes place all the same, as of a table of a few rows, is said to cost 10 thousand million, which is beyond `jit_above_cost`:
-- compiling took 0.2 s for each statement, and half a minute for an action on a hundred jobs of as many origins.
DO $$
DECLARE
    its regprocedure;
BEGIN
    FOR its IN
        SELECT p.oid::regprocedure FROM pg_proc p
        WHERE p.pronamespace = (SELECT c.relnamespace FROM pg_class c WHERE c.oid = 'sidings.job'::regclass)
          AND 'enable_seqscan=off' = ANY (p.proconfig)
    LOOP
        EXECUTE format('ALTER FUNCTION %s SET jit = off', its);
    END LOOP;
END $$;
