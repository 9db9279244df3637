-- A relay stops: from now on it does not count. Its failing topics go with it. $1 relay
DELETE FROM sidings.outbox_relay WHERE id = $1
