"""The benchmark's arithmetic: medians and ratios by round, aims, the gate, the order of runs, the page."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHES = Path(__file__).resolve().parents[2] / "benches"
MODULES = (
    "aims",
    "figures",
    "gate",
    "jobs",
    "loops",
    "machine",
    "page",
    "peers",
    "run",
    "schedule",
    "settings",
    "trial",
)


class Bench:
    """The modules of the benchmark, which is no package."""

    def __init__(self, modules: dict[str, ModuleType]) -> None:
        self._modules = modules

    def __getattr__(self, name: str) -> Any:
        return self._modules[name]


@pytest.fixture(scope="module")
def bench() -> Any:
    """They have plain names, so they are imported for these tests only."""
    before = dict(sys.modules)
    sys.path.insert(0, str(BENCHES))
    try:
        modules = {name: __import__(name) for name in MODULES}
    finally:
        sys.path.remove(str(BENCHES))
        for name in set(sys.modules) - set(before):
            if str(BENCHES) in str(getattr(sys.modules[name], "__file__", "")):
                del sys.modules[name]
    return Bench(modules)


def figures(bench: Any, workload: str, metric: str, ours: list[float], theirs: list[float]) -> Any:
    found = bench.figures.Figures()
    for peer, values in (("tensorcall", ours), ("torch", theirs)):
        for number, value in enumerate(values):
            line = {"workload": workload, "metric": metric, "value": value}
            found.add(number, "free", peer, [line])
    return found


def test_ratio_is_the_median_of_the_ratios_of_the_rounds(bench: Any) -> None:
    found = figures(bench, "L1", "p50 us", [10, 30, 20], [100, 100, 400])

    ratio = found.ratio(bench.figures.Key("L1", "p50 us"), "tensorcall", "torch")

    assert ratio == pytest.approx(0.1)


def test_aim_is_measured_against_the_better_peer(bench: Any) -> None:
    key = bench.figures.Key("C1", "calls/s")
    found = bench.figures.Figures()
    for peer, value in (("tensorcall rust", 300), ("tarpc", 150), ("tonic", 40)):
        found.add(1, "free", peer, [{"workload": "C1", "metric": "calls/s", "value": value}])
    aim = bench.aims.Aim(key, "tensorcall rust", ("tonic", "tarpc"), 1.5)

    assert aim.against(found) == "tarpc"
    assert aim.is_reached(aim.ratio(found))
    assert aim.room(aim.ratio(found)) == pytest.approx(2.0 / 1.5)
    assert "| yes " in bench.aims.table(found)


def recorded(bench: Any, monkeypatch: pytest.MonkeyPatch, folder: Path, advantage: float) -> None:
    entry = {"workload": "L1", "metric": "p50 us", "times better than torch": advantage}
    file = folder / "recorded.json"
    file.write_text(json.dumps({"about": bench.machine.describe(), "figures": [entry]}))
    monkeypatch.setattr(bench.gate, "FILE", file)


@pytest.mark.parametrize(("advantage", "is_good"), [(12.4, True), (12.6, False)])
def test_gate_lets_pass_what_is_above_four_fifths(
    bench: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, advantage: float, is_good: bool
) -> None:
    recorded(bench, monkeypatch, tmp_path, advantage)

    (verdict,) = bench.gate.verdicts(figures(bench, "L1", "p50 us", [10, 10, 10], [100, 90, 200]))

    assert verdict.is_good is is_good
    assert bench.gate.workloads([verdict]) == ("L1",)


def test_gate_misses_what_was_not_measured(
    bench: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    recorded(bench, monkeypatch, tmp_path, 2.0)

    (verdict,) = bench.gate.verdicts(bench.figures.Figures())

    assert not verdict.is_good


def test_recorded_is_the_worst_run(bench: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bench.gate, "FILE", tmp_path / "recorded.json")
    runs = [figures(bench, "L1", "p50 us", [10] * 3, theirs) for theirs in ([50, 90, 70], [60, 60, 10])]

    count = bench.gate.record(runs, {})

    assert count == 1
    (entry,) = json.loads((tmp_path / "recorded.json").read_text())["figures"]
    assert entry["times better than torch"] == pytest.approx(6.0)


def test_gate_asks_less_of_a_machine_of_another_kind(
    bench: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    recorded(bench, monkeypatch, tmp_path, 19.0)
    monkeypatch.setattr(bench.machine, "_processor", lambda: "of another kind")

    (verdict,) = bench.gate.verdicts(figures(bench, "L1", "p50 us", [10, 10, 10], [100, 90, 200]))

    assert verdict.is_good
    assert "at least 1.00x" in str(verdict)

    (verdict,) = bench.gate.verdicts(figures(bench, "L1", "p50 us", [200, 200, 200], [100, 90, 100]))
    assert not verdict.is_good


def attempt(advantage: float, others: float) -> list[dict[str, Any]]:
    """The runs of one round, in which other processes used so many cores."""
    values = {"tensorcall": 10.0, "torch": 10.0 * advantage}
    return [
        {
            "round": 1,
            "placement": "free",
            "peer": peer,
            "figures": [{"workload": "L1", "metric": "p50 us", "value": value}],
            "others": others,
        }
        for peer, value in values.items()
    ]


@pytest.mark.parametrize(
    ("attempts", "is_behind", "says"),
    [
        ([(9, 0.0)], False, "good"),
        ([(2, 0.0), (3, 0.0), (9, 0.0)], False, "good"),
        ([(2, 0.0)] * 4, True, "TOO LITTLE"),
        ([(2, 1.0), (2, 0.0), (2, 0.1), (2, 1.0)], True, "TOO LITTLE"),
        ([(2, 1.0), (2, 0.9), (2, 0.0), (2, 1.0)], False, "not judged"),
    ],
    ids=["at once", "at last", "never", "partly disturbed", "disturbed"],
)
def test_gate_fails_what_falls_short_each_time_on_a_machine_of_its_own(
    bench: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    attempts: list[tuple[float, float]],
    is_behind: bool,
    says: str,
) -> None:
    recorded(bench, monkeypatch, tmp_path, 10.0)
    measured = [attempt(*each) for each in attempts]
    asked = []

    def again(workloads: tuple[str, ...]) -> list[dict[str, Any]]:
        asked.append(workloads)
        return measured[len(asked)]

    found = bench.gate.is_behind(measured[0], again, wait=lambda _: None)

    assert found is is_behind
    assert asked == [("L1",)] * (len(attempts) - 1)
    assert says in capsys.readouterr().out.splitlines()[-2 if is_behind else -1]


def test_what_is_gated_is_what_is_recorded(bench: Any) -> None:
    entries = json.loads(bench.gate.FILE.read_text())["figures"]

    assert {bench.figures.Key(entry["workload"], entry["metric"]) for entry in entries} == set(
        bench.gate.GATED
    )


def order(
    bench: Any, monkeypatch: pytest.MonkeyPatch, peers: list[Any], rare: int
) -> list[tuple[int, str, str]]:
    """What a schedule of three rounds runs, without running it."""
    seen = []

    def try_it(run: Any, number: int, see: Any) -> Any:
        seen.append((number, run.peer.name, run.placement))
        return bench.trial.Trial(number, run.peer.name, run.placement, [], 0.0, 0.0)

    monkeypatch.setattr(bench.schedule.Schedule, "_try", staticmethod(try_it))
    chosen = [(peer, ("L1", "B1")) for peer in peers]
    settings = bench.settings.Settings((), 10, 0.1, ("1K",), "free")
    schedule = bench.schedule.Schedule(chosen, settings, ("free", "same"), (2,), Path("/nowhere"), 3, rare)
    list(schedule.run(again=0))
    return seen


@pytest.fixture
def ordered(bench: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str, str]]:
    """What a schedule of three peers runs."""
    return order(bench, monkeypatch, bench.peers.PEERS[:3], 1)


def test_peers_that_no_aim_looks_at_closely_are_measured_in_some_rounds(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    peers = [peer for peer in bench.peers.PEERS if peer.name in ("torch", "grpcio")]

    seen = {(number, name) for number, name, _ in order(bench, monkeypatch, peers, 2)}

    assert seen == {(1, "torch"), (2, "torch"), (3, "torch"), (1, "grpcio"), (2, "grpcio")}


def test_simulated_job_has_a_row_for_each_size(bench: Any) -> None:
    found = bench.figures.Figures()
    for workers, messages in ((1000, 13.2), (30, 13.1)):
        line = {"workload": f"shutdown of {workers}", "metric": "messages each", "value": messages}
        found.add(1, "free", "simulated job", [line])

    rows = bench.jobs.table(found).splitlines()[2:]

    assert [row.split("|")[1].strip() for row in rows] == ["30", "1000"]
    assert "| 13.2 " in rows[1]


def test_each_round_begins_with_another_peer(ordered: list[tuple[int, str, str]]) -> None:
    first = [next(peer for number, peer, _ in ordered if number == wanted) for wanted in (1, 2, 3)]

    assert len(set(first)) == 3
    assert len(ordered) == 3 * 3 * 2


def test_run_that_says_nothing_is_given_up(bench: Any) -> None:
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    began = time.monotonic()

    with pytest.raises(bench.trial.TrialError, match="took too long"):
        bench.trial.figures_of(command, 0.1, print)

    assert time.monotonic() - began < 30


def test_run_that_fails_shows_what_it_said(bench: Any) -> None:
    with pytest.raises(bench.trial.TrialError, match="no such thing"):
        bench.trial.figures_of([sys.executable, "-c", "raise SystemExit('no such thing')"], 30, print)


def test_cpu_clock_counts_what_a_child_uses(bench: Any) -> None:
    clock = bench.loops.CpuClock(__import__("os").getpid())
    before = clock.used()
    end = time.process_time() + 0.05
    while time.process_time() < end:
        pass

    assert clock.used() - before >= 0.04


def test_page_says_that_it_was_measured_under_load(
    bench: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(bench.page, "PAGE", tmp_path / "performance.md")
    bench.page.PAGE.write_text("before\n<!-- bench -->\nold\n<!-- /bench -->\nafter\n")
    trials = [{"round": 1, "seconds": 1.0, "others": 1.5}]
    found = figures(bench, "L1", "p50 us", [10, 20], [100, 100])

    bench.page.write(bench.page.report(found, {"command": "cargo xtask bench"}, trials), ["latency.svg"])

    text = bench.page.PAGE.read_text()
    assert text.startswith("before\n<!-- bench -->")
    assert text.endswith("<!-- /bench -->\nafter\n")
    assert "Measured under load" in text
    assert "| L1       | p50 us | torch (" not in text
    assert "0.15x" in text
    assert "old" not in text


def test_whoever_cannot_be_had_is_left_out_by_name(bench: Any, capsys: pytest.CaptureFixture[str]) -> None:
    options = bench.run.parse(["--peers", "tarpc", "--rust", "/nowhere"])

    assert bench.run.chosen(options) == []
    assert "left out: tarpc: /nowhere/bench-tarpc is not built" in capsys.readouterr().err
