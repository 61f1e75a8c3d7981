"""The page of a run: read in any state of the run, judged, drawn; everything from the run is text, and it fits a phone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import browser
import pytest
import toys
from test_inspection_page import EVIL, Seen

from dflash_train import report
from dflash_train.config.load import to_yaml
from dflash_train.config.schema import Recipe
from dflash_train.dashboard.alerts import SKIPPED, alerts, fallen, spikes
from dflash_train.dashboard.charts import Series, bar_chart, line_chart, number, thinned, ticks
from dflash_train.dashboard.page import DRAWN_PIECES, SAMPLES, run_page, write_report
from dflash_train.dashboard.run import RunView, curves_of, locate_run, read_run

CERTIFICATE = {
    "digest": "0123456789abcdef", "rows": 100, "kept": 98, "dropped": {"no_answer": 2}, "documents": 98, "tokens": 12345, "ratio": 0.6,
    "files": [{"name": "rows.jsonl", "sha256": "ab"}],
}  # fmt: skip


def rows(steps: int, every: int = 5) -> list[dict]:
    """A run's record, as training writes it."""
    found = []
    for step in range(every, steps + 1, every):
        loss = 8 / (1 + step / 40)
        train = {
            "loss": 1.5 * loss,
            "base_loss": loss,
            "selector_loss": loss / 2,
            "accept_len": 4 - 2 / (1 + step / 50),
        }
        train |= {
            "base_accept_len": 3.5 - 2 / (1 + step / 50),
            "accuracy": 0.5,
            "base_accuracy": 0.4,
            "candidate_recall": 0.8,
        }
        train |= {f"accuracy/slot_{k:02d}": 0.9 / k for k in range(1, 8)} | {
            f"base_accuracy/slot_{k:02d}": 0.8 / k for k in range(1, 8)
        }
        row = {f"train/{name}": value for name, value in train.items()}
        row |= {"train/lr": 1e-3 / step, "train/grad_norm": 1.0 + step % 3, "train/epoch": step / 40}
        row |= {
            "perf/tokens_per_second": 1500.0,
            "perf/blocks_per_second": 190.0,
            "perf/memory_gib": 1.0,
            "data/coverage": 0.8,
        }
        found.append({"step": step, **row})
        if step % 20 == 0:
            values = {
                name: 3 - 1.5 / (1 + step / 60)
                for name in ("walk_tau", "base_walk_tau", "walk_tau/code", "walk_tau/prose")
            }
            found.append({"step": step, **{f"heldout/{name}": value for name, value in values.items()}})
    return found


def measured(**changes) -> dict:
    cell = {"value": 2.5, "rounds": 40, "tokens": 100, "prompts": 4, "interval": [2.1, 2.9]}
    return {
        "prompts": 8, "tau": {"code": cell, f"{EVIL}": cell}, "tau_all": cell, "tau_by_tag": {"thinking": {"on": cell}},
        "tau_by_context": {"0-512": {**cell, "interval": None}}, "walk_tau": cell, "walk_tau_by_domain": {"code": cell}, "walk_agrees": 1.0,
        "slots": [{"slot": k, "marginal": 0.9 / k, "conditional": None if k == 7 else 0.8} for k in range(1, 8)],
        "losslessness": {"lossless": True, "identical": 8, "near_ties": 0, "different": 0, "different_ids": [], "unchecked": 0},
        "repetition": {"share": 0.02, "looping": 0}, "speedup": 1.5, "plain_seconds": 3.0, "speculative_seconds": 2.0, **changes,
    }  # fmt: skip


def sample(name: str, **changes) -> dict:
    pieces = ["It", " is", f" {EVIL}", "\n", "four", ".", ""]
    return {"id": name, "domain": "code", "tags": {"thinking": "on"}, "prompt_tokens": 9, "pieces": pieces, "rounds": [1, 3, 2],
            "verdict": "identical", **changes}  # fmt: skip


def make(folder: Path, *, steps: int = 200, files: dict[str, str] | None = None, **knobs) -> Path:
    """A run's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    recipe = Recipe(output_dir=str(folder), **knobs)
    recipe.target.path, recipe.train.max_steps, recipe.drafter.block_size = "Qwen/Qwen3-8B", 200, 8
    (folder / "config.yaml").write_text(to_yaml(recipe))
    toys.write_jsonl(folder / "metrics.jsonl", rows(steps))
    (folder / "certificate.json").write_text(json.dumps(CERTIFICATE))
    for name, text in (files or {}).items():
        (folder / name).write_text(text)
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run with an evaluation and samples."""
    files = {
        "evaluation.json": json.dumps({"source": "step-200", "trained_steps": 200, "decoded": measured(),
                                       "teacher_forced": {"walk_tau": {"code": {"value": 2.5}, "all": {"value": None}}}}),
        "decoded.jsonl": "".join(json.dumps(sample(f"p{i}")) + "\n" for i in range(3)),
    }  # fmt: skip
    return make(tmp_path_factory.mktemp("report") / f"a <b>run</b> {EVIL.replace('/', '')}"[:60], files=files)


# --- reading ---


def test_later_rows_win_where_a_run_was_resumed():
    found, _ = curves_of(
        [{"step": s, "a": float(s)} for s in (1, 2, 3, 4)] + [{"step": s, "a": 10.0 * s} for s in (3, 4)]
    )
    assert found == {"a": [(1, 1.0), (2, 2.0), (3, 30.0), (4, 40.0)]}
    found, _ = curves_of([{"step": 2, "a": 1.0}, {"step": 9, "a": 9.0}, {"step": 3, "a": 3.0}, {"step": 2, "b": 0.5}])
    assert found == {"a": [(2, 1.0), (3, 3.0)], "b": [(2, 0.5)]}, "a late row of one metric takes nothing from another"


def test_values_that_are_no_numbers_are_no_points():
    found, bad = curves_of(
        [{"step": 1, "a": float("nan"), "b": None, "c": "x", "d": True, "e": 1}, {"step": 2, "a": 2.0}]
    )
    assert found == {"a": [(2, 2.0)], "e": [(1, 1.0)]} and bad == {"a": [1]}


def test_an_empty_folder_and_a_broken_line_are_no_error(tmp_path):
    assert "No metrics yet" in run_page(read_run(tmp_path), now=0)
    make(tmp_path, steps=10)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 15, "train/lo')
    (tmp_path / "evaluation.json").write_text('{"decoded": {"ta')
    (tmp_path / "decoded.jsonl").write_text(
        json.dumps(sample("good")) + "\n" + json.dumps(sample("bad", rounds=[9])) + "\n{"
    )
    view = read_run(tmp_path)
    assert view.step == 10 and [row["id"] for row in view.decoded] == ["good"]
    page = Seen(run_page(view, now=0))
    assert not page.faults and page.text.count("Not read.") == 3
    assert "metrics.jsonl: 1 line that hold" in page.text and "decoded.jsonl: 2 rows without" in page.text


@pytest.mark.parametrize("place", ["", "export", "checkpoints/step-00000020"])
def test_a_run_is_found_by_itself_its_export_and_its_checkpoints(tmp_path, place):
    make(tmp_path / "run", steps=5)
    (tmp_path / "run" / place).mkdir(parents=True, exist_ok=True)
    assert locate_run(str(tmp_path / "run" / place)).resolve() == (tmp_path / "run").resolve()


def test_what_is_no_run_is_named(tmp_path):
    (tmp_path / "a" / "b" / "c" / "d").mkdir(parents=True)
    for source, text in ((tmp_path / "nowhere", "no such folder"), (tmp_path / "a" / "b" / "c" / "d", "no run")):
        done = toys.call(report.main, source)
        assert done.code == 2 and str(source) in done.err and text in done.err
    done = toys.call(report.main, make(tmp_path / "run", steps=5), "--watch", "0.1")
    assert done.code == 2 and "--watch 0.1: must be at least 1 second" in done.err


@pytest.mark.parametrize(("knobs", "steps", "total"), [({}, 200, 200), ({}, 50, 200), ({"max_steps": None}, 50, 240)])
def test_status(tmp_path, knobs, steps, total):
    make(tmp_path, steps=steps)
    view = read_run(tmp_path)
    view.config["train"] |= knobs
    assert view.total_steps == total and view.finished is (steps == total)
    page = run_page(view, now=view.written + 240)
    words = (
        "Finished: step 200 of 200"
        if view.finished
        else f"Under way or stopped: step {steps} of {total}, last line 4 min old"
    )
    assert words in page


def test_a_real_run_is_read(overfitted):
    from dflash_train.metrics import meaning

    view = read_run(overfitted.folder)
    assert (
        view.finished
        and view.step == 120
        and view.parameters == sum(p.numel() for p in overfitted.step.drafter.parameters())
    )
    assert [name for name in view.curves if meaning(name) is None] == [], "every metric has a text"
    page = Seen((overfitted.folder / "report.html").read_text())
    assert not page.faults and "Finished: step 120 of 120" in page.text and "WARNING" not in page.text
    assert [a.title for a in alerts(view)] == ["Who wrote the answers"], "the rows record no generator"


# --- warnings ---


def titles(view: RunView) -> list[str]:
    return [alert.title for alert in alerts(view)]


def view_of(**evaluation) -> RunView:
    return RunView(folder=Path("run"), evaluation={"decoded": measured(**evaluation)})


def test_a_good_run_has_no_warning(run):
    assert alerts(read_run(run)) == []


@pytest.mark.parametrize(("changes", "title"), [
    ({"train_serve_gap": True, "parted_ids": ["p1"]}, "Train/serve gap"),
    ({"repetition": 0.31}, "Repetition"),
    ({"repetition": {"share": 0.31}}, "Repetition"),
    ({"lossless": False, "different": 1, "different_ids": ["p9"], "losslessness": None}, "Not lossless"),
    ({"losslessness": {"lossless": False, "different": 1, "different_ids": ["p9"]}}, "Not lossless"),
    ({"losslessness": {"lossless": None}}, None), ({"repetition": {"share": None}}, None), ({"repetition": 0.3}, None),
])  # fmt: skip
def test_of_an_evaluation(changes, title):
    assert titles(view_of(**changes)) == ([] if title is None else [title])


def test_of_training():
    steps = range(1, 41)
    view = RunView(folder=Path("run"), non_finite={"train/loss": [3]})
    view.curves = {
        SKIPPED: [(1, 0.0), (2, 3.0)],
        "train/grad_norm": [(s, 50.0 if s == 30 else 1.0) for s in steps],
        "train/accept_len": [(s, 1 + s / 10) for s in steps],
        "heldout/walk_tau": [(10, 2.0), (20, 3.0), (30, 2.9), (40, 2.8)],
        "data/skipped_microbatches": [(40, 1.0)], "data/microbatches": [(40, 8.0)],
    }  # fmt: skip
    found = {alert.title: alert for alert in alerts(view)}
    assert list(found) == ["Steps skipped", "Not finite", "Held-out acceptance falls while training rises", "Gradient norm spikes",
                           "Empty micro-batches"]  # fmt: skip
    assert "3 optimizer steps" in found["Steps skipped"].text and "50 at step 30" in found["Gradient norm spikes"].text
    assert "was 3.000 at step 20 and is 2.800" in found["Held-out acceptance falls while training rises"].text


@pytest.mark.parametrize(("heldout", "trained", "falls"), [
    ([2, 3, 2.9, 2.8], [1, 2, 3, 4], True),
    ([2, 3, 2.99, 2.98], [1, 2, 3, 4], False),  # within the noise
    ([2, 3, 2.5], [1, 2, 3], False),  # one point says little
    ([2, 3, 2.5, 2.5], [1, 4, 3, 2], False),  # training falls too
    ([2, 3, 2.5, 2.99], [1, 2, 3, 4], False),  # it came back
    ([], [1], False),
])  # fmt: skip
def test_a_fall_is_one_beyond_noise_and_against_training(heldout, trained, falls):
    assert bool(fallen(*([(i, float(v)) for i, v in enumerate(values)] for values in (heldout, trained)))) is falls


def test_a_spike_is_against_its_own_past():
    assert spikes([(i, 100.0 if i < 5 else 1.0) for i in range(60)]) == [], "the beginning is no spike"
    assert spikes([(i, 11.0 if i == 50 else 1.0) for i in range(60)]) == [(50, 11.0)]
    assert spikes([]) == []


def test_of_data():
    view = RunView(
        folder=Path("run"), certificate={**CERTIFICATE, "kept": 94, "dropped": {"no_answer": 5, "bad_json": 1}}
    )
    view.notes = ["WARNING: train rows were not written by target.path", "train rows by settings:\n..."]
    found = alerts(view)
    assert [alert.title for alert in found] == ["Rows dropped", "Who wrote the answers"]
    assert "6.0% of the data's rows were not usable: 5 no_answer, 1 bad_json" in found[0].text
    view.certificate["kept"], view.notes = 95, []
    assert alerts(view) == []


# --- drawing ---


@pytest.mark.parametrize(
    ("low", "high"), [(0, 1), (0.981, 0.982), (-3, 7), (1e-5, 6e-4), (2, 2), (0, 0), (1234, 98765), (-1e9, 1e9)]
)
def test_ticks_are_round_and_enclose(low, high):
    found = ticks(low, high)
    assert found[0] <= low + 1e-9 * abs(low) and found[-1] >= high - 1e-9 * abs(high) and 2 <= len(found) <= 6
    assert found == sorted(set(found))


def test_numbers_are_short():
    assert [number(v) for v in (0, 0.00060, 1.2345, 999.4, 1506.4, 15064, 2.43e6, 8.1e9)] == [
        "0", "0.0006", "1.23", "999", "1,506", "15.1k", "2.43M", "8.1G"]  # fmt: skip


def test_many_points_are_thinned_without_losing_a_peak():
    points = [(i, 1.0) for i in range(10_000)]
    points[7777], points[8888] = (7777, 9.0), (8888, -9.0)
    few = thinned(points)
    assert len(few) <= 402 and {(7777, 9.0), (8888, -9.0), points[0], points[-1]} <= set(few)
    assert thinned(points[:400]) == points[:400]


def test_odd_curves_are_drawn():
    assert line_chart("nothing", [Series(label="a", points=[])]) == ""
    assert bar_chart("nothing", ["1"], {"a": [None]}) == ""
    for points in ([(5, 1.0)], [(5, 0.0), (6, 0.0)], [(1, -1e-12), (2, 1e12)]):
        drawn = Seen(line_chart("one", [Series(label="a", points=points)]))
        assert not drawn.faults and len(drawn.named("path")) == 1 and "nan" not in drawn.named("path")[0]["d"]
    many = line_chart("domains", [Series(label=f"d{i}", points=[(1, float(i))]) for i in range(12)])
    assert "c7" in many and "c3 dashed" in many


def test_what_the_run_says_is_text(run):
    page = Seen(run_page(read_run(run), now=0))
    assert not page.faults
    assert len(page.named("script")) == 1 and len(page.named("style")) == 1 and not page.named("img")
    assert page.text.count(EVIL) >= 4, "a domain and the text of three samples"
    for tag, attributes in page.elements:
        assert not {"src", "href", "srcset", "action"} & set(attributes), tag
        assert not [name for name in attributes if name.startswith("on")], tag
    (policy,) = [a["content"] for a in page.named("meta") if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none'")


def test_it_has_everything(run):
    page = Seen(run_page(read_run(run), now=0))
    for text in ("Qwen/Qwen3-8B", "block size 8", "0123456789abcdef", "98 of 100", "2.10 to 2.90", "0-512", "* fewer than 5 prompts",
                 "1.50x plain decoding (3.0 s against 2.0 s)", "decoding took its rounds on 100%", "8 identical", "2.0% of the tokens"):  # fmt: skip
        assert text in page.text, text
    captions = [part.split("<")[0].strip() for part in run_page(read_run(run), now=0).split("<figcaption>")[1:]]
    assert captions[0] == "Accept length, training"
    assert {"Loss", "Learning rate", "Gradient norm before clipping", "Walk tau by domain, held out", "Tokens per second",
            "Acceptance by slot, decoded", "Accuracy by slot, newest window of training"} <= set(captions)  # fmt: skip
    first = json.loads(page.named("figure", "chart")[0]["data-points"])
    assert first[0][1] == "step 5" and [row[0] for row in first[0][2]] == ["base_accept_len", "accept_len"]
    assert len(page.named("rect")) == 7 + 7 + 7 + 6, "a slot without a value has no bar"


def test_tokens_have_the_colour_of_their_round(tmp_path):
    make(tmp_path, steps=5)
    for accepted, last in ((None, "r2 bonus"), ([0, 2, 2], "r2")):
        row = sample("p") | ({"accepted": accepted} if accepted else {})
        (tmp_path / "decoded.jsonl").write_text(json.dumps(row) + "\n")
        spans = [a["class"] for a in Seen(run_page(read_run(tmp_path), now=0)).named("span", "p") if "title" in a]
        assert spans == ["p first", "p r0 bonus", "p r1", "p r1", "p r1 bonus", "p r2", f"p {last}"]


def test_samples_are_few_and_the_wrong_ones_first(tmp_path):
    make(tmp_path, steps=5)
    many = [sample(f"p{i}", domain=f"d{i % 9}", prompt=f"ask {i}") for i in range(90)]
    many[89]["verdict"] = "different"
    many.append(sample("long", domain="long", pieces=["x"] * 1000, rounds=[9] * 111))
    (tmp_path / "decoded.jsonl").write_text("".join(json.dumps(row) + "\n" for row in many))
    page = Seen(run_page(read_run(tmp_path), now=0))
    assert len(page.named("details", "sample")) == SAMPLES and not page.faults
    assert page.text.index("p89") < page.text.index("p0") and "NOT what plain decoding says" in page.text
    (tmp_path / "decoded.jsonl").write_text(json.dumps(many[-1]) + "\n")
    assert f"{1000 - DRAWN_PIECES} more tokens are not drawn" in run_page(read_run(tmp_path), now=0)


# --- the command ---


def test_the_command_writes_the_page(run, tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    done = toys.call(report.main, run, "--output", tmp_path / "deep" / "page.html", "--open")
    assert done.code == 0 and f"page: {tmp_path / 'deep' / 'page.html'}" in done.out
    assert opened == [(tmp_path / "deep" / "page.html").as_uri()]
    assert list((tmp_path / "deep").iterdir()) == [tmp_path / "deep" / "page.html"]
    assert "data-refresh" not in (tmp_path / "deep" / "page.html").read_text().split("<script>")[0]


def test_watching_makes_it_again_when_something_changes(tmp_path):
    make(tmp_path / "run", steps=10)
    command = [sys.executable, "-m", "dflash_train.report", str(tmp_path / "run"), "--watch", "1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ))
    page = tmp_path / "run" / "report.html"
    try:
        assert process.stdout.readline() == f"page: {page}\n"
        first = page.read_text()
        assert 'data-refresh="1"' in first and "step 10 of 200" in first
        toys.write_jsonl(tmp_path / "run" / "metrics.jsonl", rows(20))
        until = time.monotonic() + 30
        while "step 20 of 200" not in page.read_text():
            assert time.monotonic() < until
            time.sleep(0.2)
    finally:
        process.send_signal(2)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 130 and "interrupted" in err


# --- in a browser ---


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_browser_shows_it(run, width, dark, tmp_path):
    path = write_report(run, tmp_path / "page.html")
    with browser.page() as page:
        page.open(path, width=width, dark=dark)
        assert page.overflow() == []
        lengths = page.evaluate("[...document.querySelectorAll('path.line')].map((e) => e.getTotalLength())")
        assert len(lengths) == 18 and all(length > 50 for length in lengths)
        boxes = page.evaluate(
            "[...document.querySelectorAll('.chart svg')].map((e) => e.getBoundingClientRect().width)"
        )
        assert all(250 < box < 600 for box in boxes if box), "of those that are not folded"
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(json.loads(background.replace("rgb(", "[").replace(")", "]"))) < 384) is dark
        # Pointing shows the nearest step's values inside the window; leaving hides them; arrow keys walk.
        point = """((where) => { const svg = document.querySelector('.chart svg'), box = svg.getBoundingClientRect();
          svg.dispatchEvent(new PointerEvent(where === null ? 'pointerleave' : 'pointermove', {bubbles: true, pointerType: 'mouse',
          clientX: box.left + box.width * where, clientY: box.top + 40})); })"""
        tip = "document.querySelector('.chart .tip')"
        for where, step in ((0.99, "step 200"), (0.0, "step 5")):
            page.evaluate(f"{point}({where})")
            text = page.evaluate(f"{tip}.textContent")
            assert text.startswith(step) and "base_accept_len" in text and page.overflow() == []
        assert page.evaluate("document.querySelectorAll('.chart .at circle').length") == 2
        page.evaluate(f"{point}(null)")
        assert page.evaluate(f"{tip}.hidden")
        page.evaluate(
            "document.querySelector('.chart').dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowLeft'}))"
        )
        assert page.evaluate(f"{tip}.textContent").startswith("step 200")
        page.evaluate("document.querySelectorAll('details').forEach((e) => { e.open = true; })")
        assert page.overflow() == []
        page.screenshot(tmp_path / "page.png")
        assert (tmp_path / "page.png").read_bytes().startswith(b"\x89PNG")
        assert page.complaints == []


@pytest.mark.slow
def test_a_watched_page_loads_itself_again_where_it_was(run, tmp_path):
    path = write_report(run, tmp_path / "page.html", refresh=1)
    with browser.page() as page:
        page.open(path, width=1280)
        page.evaluate("scrollTo(0, 700), document.querySelectorAll('.sample')[1].open = true, window.mark = 1")
        until = time.monotonic() + 30
        while page.evaluate("window.mark") == 1:
            assert time.monotonic() < until
            time.sleep(0.3)
        time.sleep(0.3)
        assert page.evaluate("[Math.round(scrollY), document.querySelectorAll('.sample')[1].open]") == [700, True]


ODD = (None, 3, "x", [], {}, [1], {"a": 1})


def places(value, at=()):
    """Every path into a JSON value; of a list its first item."""
    yield at
    for key in value if isinstance(value, dict) else [0][: len(value)] if isinstance(value, list) else []:
        yield from places(value[key], (*at, key))


@pytest.mark.parametrize("name", ["certificate.json", "evaluation.json", "decoded.jsonl"])
def test_a_file_that_holds_something_else_costs_its_part_of_the_page_only(tmp_path, name):
    whole = {
        "certificate.json": CERTIFICATE, "evaluation.json": {"decoded": measured(), "source": "x"},
        "decoded.jsonl": {"id": "a", "domain": "d", "tags": {"t": "v"}, "pieces": ["a", "b"], "rounds": [1], "accepted": [0], "verdict": None},
    }[name]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(10)))
    for at in places(whole):
        for odd in ODD:
            changed = json.loads(json.dumps(whole))
            inner = changed
            for key in at[:-1]:
                inner = inner[key]
            if at:
                inner[at[-1]] = odd
            (tmp_path / name).write_text(json.dumps(changed if at else odd))
            page = run_page(read_run(tmp_path), now=0.0)
            assert "Accept length, training" in page, (at, odd)


def test_the_name_of_a_tag_is_text(tmp_path):
    cell = measured()["tau_all"]
    (tmp_path / "evaluation.json").write_text(json.dumps({"decoded": measured(tau_by_tag={EVIL: {EVIL: cell}})}))
    page = run_page(read_run(tmp_path), now=0.0)
    assert EVIL not in page
