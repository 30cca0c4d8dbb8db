"""Slow: many clients at once, and requests made up by a machine from the API's own description."""

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
from tests.web.conftest import serving

pytestmark = pytest.mark.slow

#: Overridden to try a shorter run by hand.
SECONDS = float(os.environ.get("CLEARHEAD_LOAD_SECONDS", "120"))
FUZZ_SECONDS = float(os.environ.get("CLEARHEAD_FUZZ_SECONDS", "600"))
CLIENTS = 64
TEXTS = ["so boring", "I like the movie", "a gripping film , but the ending is dull", "You look extremely confused"]


def resident() -> int:
    """The bytes that this process holds in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
def test_many_clients_at_once_lose_nothing() -> None:
    limits = Limits(waiting=32, seconds=60.0)
    answers: Counter[str] = Counter()
    slowest = [0.0]
    memory: list[int] = []
    wrong: list[str] = []
    note = threading.Lock()

    def one_client(number: int, address: str, until: float) -> None:
        with httpx.Client(base_url=address, timeout=limits.seconds + 30) as client:
            while time.monotonic() < until:
                text = TEXTS[number % len(TEXTS)]
                methods = [["generic"], ["generic", "attcat", "rollout"], ["saliency"]][number % 3]
                began = time.monotonic()
                answer = client.post(
                    "/api/explanations", json={"model": "zoo:sentiment", "text": text, "methods": methods}
                )
                took = time.monotonic() - began
                with note:
                    answers[str(answer.status_code)] += 1
                    if answer.status_code == 200:
                        slowest[0] = max(slowest[0], took)
                        found = answer.json()
                        if sorted(found["explanations"]) != sorted(methods) or found["problems"]:
                            wrong.append(str(found["problems"]))
                        if found["explanations"][methods[0]]["units"]["texts"] != [text]:
                            wrong.append("the answer to somebody else")
                    elif answer.status_code != 429:
                        wrong.append(answer.text[:200])
                if answer.status_code == 429:
                    time.sleep(min(float(answer.headers["retry-after"]), 5.0))

    with serving(models={"zoo:sentiment": clearhead.load("zoo:sentiment")}, limits=limits) as address:
        until = time.monotonic() + SECONDS
        threads = [threading.Thread(target=one_client, args=(i, address, until)) for i in range(CLIENTS)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            time.sleep(1.0)
            memory.append(resident())
        for thread in threads:
            thread.join()
        left = httpx.get(f"{address}/api/about").json()["waiting"]
    warm = memory[len(memory) // 4 :]
    grown = (max(warm[len(warm) // 2 :]) - max(warm[: len(warm) // 2])) / 2**20
    print(f"{dict(answers)}, slowest {slowest[0]:.2f} s, memory {warm[0] / 2**20:.0f} MiB, grown by {grown:.1f} MiB")
    assert wrong == [] and left == 0
    assert set(answers) <= {"200", "429"} and answers["200"] > CLIENTS
    assert slowest[0] <= limits.seconds + 1
    assert grown < 50


def test_requests_made_up_from_the_description_find_no_fault_of_the_server() -> None:
    import schemathesis
    from hypothesis import HealthCheck, Phase, settings

    models = {name: clearhead.load(name) for name in ("zoo:sentiment", "zoo:pets")}
    calls: Counter[int] = Counter()
    faults: list[str] = []
    with serving(models=models, limits=Limits(seconds=20.0)) as address:
        schema = schemathesis.openapi.from_url(f"{address}/api/openapi.json")
        until = time.monotonic() + FUZZ_SECONDS
        operations = [result.ok() for result in schema.get_all_operations()]
        seed = 0
        while time.monotonic() < until:
            seed += 1
            for operation in operations:
                _try(operation, address, until, seed, calls, faults, settings, HealthCheck, Phase)
    print(f"{sum(calls.values())} requests over {len(operations)} operations: {dict(calls)}")
    assert faults == []
    assert len(operations) >= 10 and sum(calls.values()) > FUZZ_SECONDS / 2 and calls[200] > 0


def _try(
    operation: Any, address: str, until: float, seed: int, calls: Counter[int], faults: list[str], *hypothesis: Any
) -> None:
    """Some requests of one kind, half of them against its description."""
    from hypothesis import given
    from hypothesis import seed as seeded
    from hypothesis import strategies as st
    from schemathesis import GenerationMode

    settings, health, phase = hypothesis
    cases = st.one_of(
        *(operation.as_strategy(generation_mode=mode) for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE))
    )

    @seeded(seed)
    @settings(
        max_examples=15, deadline=None, database=None, phases=[phase.generate], suppress_health_check=list(health)
    )
    @given(case=cases)
    def check(case: Any) -> None:
        if time.monotonic() > until:
            return
        answer = case.call(base_url=address, timeout=60)
        calls[answer.status_code] += 1
        if answer.status_code >= 500:
            faults.append(f"{operation.label}: {answer.status_code} {case.as_curl_command()[:500]}")

    check()
