"""The OpenAPI document says what is true: schemathesis asks every route for what it allows, and for what it does not."""

from __future__ import annotations

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import Case, GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance

from tests.serving import TOKEN, Served

EXAMPLES = 20
SEED = 20_261_129
LISTS = ("", "/started", "/processed")
OPERATIONS = [
    *(("GET", f"/api/leases{which}") for which in ("", "/active", "/expired", "/renewed", "/released", "/{id}")),
    *(("POST", "/api/leases"), ("PUT", "/api/leases/renew"), ("DELETE", "/api/leases/release"), ("DELETE", "/api/leases/{id}")),
    *(("GET", f"/api/tasks{which}") for which in (*LISTS, "/{id}")),
    *(("POST", "/api/tasks"), ("POST", "/api/tasks/next")),
    *(("PUT", f"/api/tasks/{{id}}/{verb}") for verb in ("heartbeat", "complete", "fail", "release")),
    *(("GET", "/api/generator"), ("POST", "/api/generator/start"), ("POST", "/api/generator/stop")),
    *(("GET", path) for path in ("/healthz", "/readyz", "/metrics")),
]


@pytest.fixture(scope="module")
def document(served: Served) -> schemathesis.BaseSchema:
    return schemathesis.openapi.from_url(f"{served.url}/openapi.json")


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=lambda mode: mode.value)
@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_a_route_answers_as_the_document_says(
    served: Served, document: schemathesis.BaseSchema, method: str, path: str, mode: GenerationMode
) -> None:
    operation = document[path][method]
    if mode is GenerationMode.NEGATIVE and not list(operation.iter_parameters()) and not operation.body:
        return  # nothing to get wrong

    @seed(SEED)
    @settings(max_examples=EXAMPLES, database=None, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(generation_mode=mode))
    def ask(case: Case) -> None:
        # A connection each: what is sent may leave one in any state. What JSON Schema has no word for (bytes instead of
        # characters, a cursor that was given, NUL) is refused although the document allows it.
        headers = {"Authorization": f"Bearer {TOKEN}", "Connection": "close"}
        case.call_and_validate(headers=headers, excluded_checks=[positive_data_acceptance], timeout=20)

    ask()


def test_the_document_holds_every_route_and_the_one_shape_of_errors(served: Served) -> None:
    found = served.http.get("/openapi.json").json()
    operations = {(method.upper(), path) for path, methods in found["paths"].items() for method in methods}
    assert operations == set(OPERATIONS)
    assert "HTTPValidationError" not in found["components"]["schemas"]
    for path, methods in found["paths"].items():
        for method, operation in methods.items():
            for status, answer in operation["responses"].items():
                if status[0] in "45":
                    shape = answer["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
                    assert shape in ("Error", "HeldError"), (method, path, status)


def test_the_server_has_no_fault_after_all_that(served: Served) -> None:
    assert not served.process.find("internal_error")
    assert served.http.get("/readyz").status_code == 200
