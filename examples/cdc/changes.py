"""What change data capture sends for random transactions on the article's four tables."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Change", "Database", "records", "refresh"]


@dataclass(frozen=True)
class Change:
    """A row change."""

    table: str
    operation: str
    data: dict[str, Any]


@dataclass
class Database:
    """Makes transactions that make sense: nothing is modified before it is there."""

    chance: random.Random
    customers: list[int] = field(default_factory=list[int])
    addresses: list[int] = field(default_factory=list[int])

    def transaction(self) -> list[Change]:
        """The row changes of one transaction."""
        kind = self.chance.choice(["new customer", "batch of addresses", "moves", "renamed"])
        if not self.customers or not self.addresses or kind == "new customer":
            customer, address = self._next(self.customers), self._next(self.addresses)
            return [
                Change("Addresses", "INSERT", {"address_id": address, "street_name": "HALE"}),
                Change("Customers", "INSERT", {"customer_id": customer, "since": "1996-03-01"}),
                Change("CustomerNames", "INSERT", {"customer_id": customer, "name_type": "full", "name": "Ann Hale"}),
                Change("CustomerAddresses", "INSERT", {"customer_id": customer, "address_id": address, "type": "home"}),
            ]
        customer = self.chance.choice(self.customers)
        if kind == "batch of addresses":
            count = self.chance.randint(2, 20)
            return [Change("Addresses", "INSERT", {"address_id": self._next(self.addresses)}) for _ in range(count)]
        if kind == "moves":
            address = self._next(self.addresses)
            return [
                Change("Addresses", "INSERT", {"address_id": address, "street_name": "ELM"}),
                Change("CustomerAddresses", "UPDATE", {"customer_id": customer, "address_id": address, "type": "home"}),
            ]
        name = {"customer_id": customer, "name_type": "full", "name": "Ann Elm"}
        return [Change("CustomerNames", "UPDATE", name)]

    def _next(self, ids: list[int]) -> int:
        ids.append(len(ids) + 1)
        return ids[-1]


def records(transaction: str, changes: Sequence[Change]) -> list[bytes]:
    """The messages of a transaction, in the article's form."""
    return [
        _record(change, transactionId=transaction, transactionEventCounter=n, transactionLastEvent=n == len(changes))
        for n, change in enumerate(changes, 1)
    ]


def refresh(changes: Sequence[Change]) -> list[bytes]:
    """The messages of an initial load: they belong to no transaction."""
    return [_record(change) for change in changes]


def _record(change: Change, **header: object) -> bytes:
    told = {"table": change.table, "operation": change.operation} | header
    return json.dumps({"header": told, "data": change.data}).encode()
