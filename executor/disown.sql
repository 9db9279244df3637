-- Two cycles were sent, and an answer is missing: from the commit of this on, no cycle that was sent before can apply any more,
-- wherever it is; until then it waits for the one that is at work. So the `cycle` that is read next is the last that has
-- committed of them. A takeover and a person's intervention bump the same fence. No row: it was removed. $1 executor
UPDATE sidings.executor SET fence = fence + 1 WHERE id = $1 RETURNING fence
