"""Slow: many concurrent clients, and requests fuzzed from the OpenAPI schema."""

import os
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

import clearhead
from clearhead.web import Limits
from tests.web.conftest import run_server

pytestmark = pytest.mark.slow

#: Set by the environment for a shorter run by hand.
SECONDS = float(os.environ.get("CLEARHEAD_LOAD_SECONDS", "120"))
FUZZ_SECONDS = float(os.environ.get("CLEARHEAD_FUZZ_SECONDS", "600"))
CLIENTS = 64
TEXTS = ["so boring", "I like the movie", "a gripping film , but the ending is dull", "You look extremely confused"]


def get_resident_bytes() -> int:
    """Return the resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
def test_concurrent_clients_get_their_own_results_without_memory_growth() -> None:
    limits = Limits(max_pending_requests=32, timeout_seconds=60.0)
    status_counts: Counter[str] = Counter()
    slowest = [0.0]
    memory: list[int] = []
    problems: list[str] = []
    lock = threading.Lock()

    def run_client(number: int, address: str, deadline: float) -> None:
        with httpx.Client(base_url=address, timeout=limits.timeout_seconds + 30) as client:
            while time.monotonic() < deadline:
                text = TEXTS[number % len(TEXTS)]
                methods = [["generic"], ["generic", "attcat", "rollout"], ["saliency"]][number % 3]
                start = time.monotonic()
                response = client.post(
                    "/api/explanations", json={"model": "zoo:sentiment", "text": text, "methods": methods}
                )
                duration = time.monotonic() - start
                with lock:
                    status_counts[str(response.status_code)] += 1
                    if response.status_code == 200:
                        slowest[0] = max(slowest[0], duration)
                        result = response.json()
                        if sorted(result["explanations"]) != sorted(methods) or result["errors"]:
                            problems.append(str(result["errors"]))
                        if result["explanations"][methods[0]]["units"]["texts"] != [text]:
                            problems.append("the result of another client")
                    elif response.status_code != 429:
                        problems.append(response.text[:200])
                if response.status_code == 429:
                    time.sleep(min(float(response.headers["retry-after"]), 5.0))

    with run_server(models={"zoo:sentiment": clearhead.load("zoo:sentiment")}, limits=limits) as address:
        deadline = time.monotonic() + SECONDS
        threads = [threading.Thread(target=run_client, args=(i, address, deadline)) for i in range(CLIENTS)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            time.sleep(1.0)
            memory.append(get_resident_bytes())
        for thread in threads:
            thread.join()
        num_waiting = httpx.get(f"{address}/api/about").json()["num_pending_requests"]
    warm = memory[len(memory) // 4 :]
    growth = (max(warm[len(warm) // 2 :]) - max(warm[: len(warm) // 2])) / 2**20
    resident = f"memory {warm[0] / 2**20:.0f} MiB, grown by {growth:.1f} MiB"
    print(f"{dict(status_counts)}, slowest {slowest[0]:.2f} s, {resident}")
    assert problems == [] and num_waiting == 0
    assert set(status_counts) <= {"200", "429"} and status_counts["200"] > CLIENTS
    assert slowest[0] <= limits.timeout_seconds + 1
    assert growth < 50


def test_fuzzed_requests_cause_no_server_error() -> None:
    import schemathesis
    from hypothesis import HealthCheck, Phase, settings

    models = {name: clearhead.load(name) for name in ("zoo:sentiment", "zoo:pets")}
    status_counts: Counter[int] = Counter()
    server_errors: list[str] = []
    with run_server(models=models, limits=Limits(timeout_seconds=20.0)) as address:
        schema = schemathesis.openapi.from_url(f"{address}/api/openapi.json")
        deadline = time.monotonic() + FUZZ_SECONDS
        operations = [result.ok() for result in schema.get_all_operations()]
        seed = 0
        while time.monotonic() < deadline:
            seed += 1
            for operation in operations:
                _fuzz_operation(
                    operation, address, deadline, seed, status_counts, server_errors, settings, HealthCheck, Phase
                )
    print(f"{sum(status_counts.values())} requests over {len(operations)} operations: {dict(status_counts)}")
    assert server_errors == []
    assert len(operations) >= 10 and sum(status_counts.values()) > FUZZ_SECONDS / 2 and status_counts[200] > 0


def _fuzz_operation(
    operation: Any,
    address: str,
    deadline: float,
    seed: int,
    status_counts: Counter[int],
    server_errors: list[str],
    *hypothesis: Any,
) -> None:
    """Send generated requests of one operation, valid and invalid ones."""
    from hypothesis import given
    from hypothesis import seed as with_seed
    from hypothesis import strategies as st
    from schemathesis import GenerationMode

    settings, health, phase = hypothesis
    cases = st.one_of(
        *(operation.as_strategy(generation_mode=mode) for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE))
    )

    @with_seed(seed)
    @settings(
        max_examples=15, deadline=None, database=None, phases=[phase.generate], suppress_health_check=list(health)
    )
    @given(case=cases)
    def check(case: Any) -> None:
        if time.monotonic() > deadline:
            return
        response = case.call(base_url=address, timeout=60)
        status_counts[response.status_code] += 1
        if response.status_code >= 500:
            server_errors.append(f"{operation.label}: {response.status_code} {case.as_curl_command()[:500]}")

    check()
