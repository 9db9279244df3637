"""A multi-tenant administration over Kafka and Postgres, with transactions across both. See README.md.

Reading order:

* `events`     what clients send and see, and what stands in Kafka
* `tenants`    the API's side of the tenants: rules, routes, and the consumers that learn what became of a change
* `requests`   what all requests share: done once, answered when Kafka has acknowledged
* `processor`  registers tenants with the payment provider, in jobs
* `users`      the second vertical, whole in one module; transactions of several events
* `payment`    the client of the payment provider; `provider` is the provider, with its bad days
* `client`     the client library
* `serve`      a process of the system; `settings`, `topics`; `crash` is for the tests
* `__main__`   everything in one process, and a story
"""
