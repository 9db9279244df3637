-- `SELECT sidings.enqueue(…)`: jobs from SQL, from triggers and from other languages.
--
-- The job exists if and only if the transaction of the call commits; a single statement is its own transaction. It is
-- what jobs/insert_job.sql stores, under the same rules: the transaction id is taken before the position, and a delayed
-- job gets no position. The payload is checked by its type's model only when the job runs; one that does not fit is held.
--
--   type       of the job: the name of its handler
--   payload    json; a row_to_json(NEW), a json_build_object(…)
--   origin     'topic/partition'
--   "group"    jobs of one origin and group run one at a time, in order; null: the job stands alone
--   delay      interval, at most 366 days; or run_at, the time when it becomes due
--   priority   -100 to 100, larger first, between groups only
--   headers    a jsonb object of texts, e.g. {"correlation_id": "…"}
--
-- Returns the job's id. What cannot be stored is refused with SQLSTATE 22023 and a hint; nothing is written then.
CREATE FUNCTION sidings.enqueue(
    type     text,
    payload  json,
    origin   text,
    "group"  text DEFAULT NULL,
    delay    interval DEFAULT NULL,
    run_at   timestamptz DEFAULT NULL,
    priority integer DEFAULT 0,
    headers  jsonb DEFAULT NULL
) RETURNS bigint
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    problem text;
    remedy  text;
    due     timestamptz;
    new_id  bigint;
BEGIN
    CASE
        WHEN type IS NULL OR type = '' THEN
            problem := 'the job has no type';
            remedy := 'Give the name of its handler, e.g. ''send_eta''.';
        WHEN origin IS NULL OR origin = '' THEN
            problem := format('the job %L needs an origin', type);
            remedy := 'Give origin => ''topic/partition'', the Kafka partition of the entity''s key.';
        WHEN "group" = '' THEN
            problem := format('the group of the job %L is empty', type);
            remedy := 'Give the key of its entity, or NULL for a job that stands alone.';
        WHEN strpos(concat(type, origin, "group"), chr(31)) > 0 THEN
            problem := format('type, origin or group of the job %L holds a control character that cannot be stored (U+001F)', type);
            remedy := 'Remove it.';
        WHEN octet_length(type) > 1000 OR octet_length(origin) > 1000 OR octet_length("group") > 1000 THEN
            problem := format('type, origin or group of the job %L is longer than 1000 bytes', left(type, 40));
            remedy := 'Use a shorter name, e.g. a hash of it: an index entry has to fit.';
        WHEN delay IS NOT NULL AND run_at IS NOT NULL THEN
            problem := format('the job %L has both delay and run_at', type);
            remedy := 'Give one of them.';
        WHEN delay < interval '0' OR delay > interval '366 days' THEN
            problem := format('the delay of the job %L is %s', type, delay);
            remedy := 'Give between 0 and 366 days, or use run_at.';
        WHEN NOT isfinite(run_at) THEN
            problem := format('the job %L would become due at %s', type, run_at);
            remedy := 'Give a time that comes.';
        WHEN priority IS NULL OR priority NOT BETWEEN -100 AND 100 THEN
            problem := format('the priority of the job %L is %s', type, coalesce(priority::text, 'NULL'));
            remedy := 'Give a whole number from -100 to 100.';
        WHEN jsonb_typeof(headers) <> 'object' OR jsonb_path_exists(headers, '$.* ? (@.type() != "string")') THEN
            problem := format('the headers of the job %L are not an object of texts', type);
            remedy := 'Give e.g. jsonb_build_object(''correlation_id'', …).';
        ELSE
            due := coalesce(run_at, clock_timestamp() + nullif(delay, interval '0'));
            INSERT INTO sidings.job (type, origin, "group", priority, run_at, headers, payload, position)
            VALUES (enqueue.type, enqueue.origin, enqueue."group", enqueue.priority, due, enqueue.headers, enqueue.payload,
                    CASE WHEN due IS NULL AND pg_current_xact_id() IS NOT NULL THEN nextval('sidings.job_position') END)
            RETURNING job.id INTO new_id;
            RETURN new_id;
    END CASE;
    RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value', MESSAGE = problem, HINT = remedy;
END $$;
