-- Where letters are Turkish ones (locale tr or az), the capital of i has a dot, and the small one of I none: terminal_id became terminalİd.
-- runs with 0019

-- As in 0012, but for that letter.
CREATE OR REPLACE FUNCTION sidings.camel_case(name text) RETURNS text
LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE
RETURN (SELECT string_agg(CASE WHEN n > 1 THEN upper(translate(left(word, 1), 'i', 'I')) ELSE lower(translate(left(word, 1), 'I', 'i')) END
                          || lower(translate(substr(word, 2), 'I', 'i')), '' ORDER BY n)
        FROM unnest(string_to_array(name, '_')) WITH ORDINALITY w (word, n));
