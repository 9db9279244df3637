"""Real-time visibility of freight: the demo of Sidings, and its acceptance test. `make demo` runs it.

A thousand lorries report their positions through Kafka. For every report the service updates the lorry's row and tells
the carrier the new time of arrival, over HTTP. Some carriers' systems fail for a while; meanwhile the demo kills a
service instance, stops another and starts a new one. At the end it proves from an audit table that nothing was lost,
doubled, reordered or delayed, and shows what happens when the carrier is called inside the message handler instead.

Reading order:

* `service`      what you would write: a model, a job, a consumer. Start here.
* `inline`       the same without jobs, for comparison
* `carrier`      the HTTP calls to the carrier; `flaky` is the carrier that answers them, with its faults
* `producer`     the lorries; `routes` is where they drive
* `instance`     the process that runs `service` or `inline`; `audit` records every handler run
* `scenario`     who is started, killed and stopped when; `crew`, `children`, `stage`, `settings` are what it stands on
* `observe`      figures from Postgres and Kafka while it runs; `view` shows them
* `verify`       what must be true at the end; `sabotage` breaks it on purpose
* `compare`      how long the carrier waited for its ETAs; `report` prints the verdict, and both ways side by side
* `__main__`     the command line
"""
