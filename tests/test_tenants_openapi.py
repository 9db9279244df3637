"""The API keeps what its OpenAPI document says: schemathesis makes up requests, right and wrong ones."""

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode

from .tenants_support import ANN, staged


@pytest.fixture(scope="module")
def api(
    sidings_postgres: str, sidings_kafka: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Any]]:
    with staged(sidings_postgres, sidings_kafka, tmp_path_factory.mktemp("tenants")) as stage:
        process = stage.start("api").started()
        yield process.url, schemathesis.openapi.from_url(f"{process.url}/openapi.json")


def made(url: str) -> tuple[dict[str, str], dict[str, str]]:
    """A tenant and a user, for requests to meet."""
    with httpx.Client(base_url=url, timeout=30) as http:
        tenant = http.post("/tenants", json=ANN).json()
        user = http.post(f"/tenants/{tenant['id']}/users", json={"email": ANN["email"], "name": "Ann"}).json()
    return tenant, user


# The same requests at every run (derandomize), and few enough to be quick.
QUICK = settings(
    max_examples=15, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)


@pytest.mark.long
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["right", "wrong"])
def test_the_api_answers_as_its_openapi_document_says(api: tuple[str, Any], mode: GenerationMode) -> None:
    url, api_schema = api
    tenant, user = made(url)
    operations = [result.ok() for result in api_schema.get_all_operations()]
    assert len(operations) == 11
    for operation in operations:

        @QUICK
        @given(operation.as_strategy(generation_mode=mode))
        def answers_well(case: schemathesis.Case) -> None:
            if mode is GenerationMode.POSITIVE and case.method != "GET":
                # A key that came again with another body would be refused, and the schema cannot say so.
                case.headers = {"Idempotency-Key": str(uuid4())}
                if case.method == "POST":
                    case.body.pop("request_id", None)
            if mode is GenerationMode.POSITIVE and case.path.startswith("/tenants/{"):
                # Made up ids would meet nothing but 404.
                name, id = ("tenant", "id") if "{tenant}" in case.path else ("id", None)
                if name == "tenant" or case.method != "DELETE":
                    case.path_parameters[name] = tenant["id"]
                if id is not None and id in case.path_parameters and case.method != "DELETE":
                    case.path_parameters[id] = user["id"]
            case.call_and_validate(timeout=30)

        answers_well()
