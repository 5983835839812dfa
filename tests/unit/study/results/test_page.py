"""The HTML page of a report, checked without a browser."""

from __future__ import annotations

import html.parser
import json
import math
import re

import pytest
from fake_runs import fake_run

from mingpt_ddp.study.results.report import report

HOSTILE = "<script>alert('&\"')</script>\x1b[2J"
# half the width of the 95% interval of two values that differ by 0.2
HALF_WIDTH = math.tan(0.475 * math.pi) / 10


class Page(html.parser.HTMLParser):
    """A parsed page: its elements with their attributes, the visible text, and the figures."""

    def __init__(self, path) -> None:
        super().__init__()
        self.tags, self.text, self._inside = [], "", ""
        self.feed(path.read_text())
        self.headings = re.findall("<h2>(.*?)</h2>", path.read_text())

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self._inside = "figures" if ("id", "figures") in attributes else tag

    def handle_endtag(self, tag):
        self._inside = ""

    def handle_data(self, data):
        if self._inside == "figures":
            self.figures = json.loads(data)
        elif self._inside not in ("script", "style"):
            self.text += data

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)

    def titles(self) -> list[str]:
        """Return the title of each figure of curves, and the parameter of each other figure."""
        layouts = [figure["layout"] for figure in self.figures]
        return [each.get("title", each["xaxis"]["title"])["text"] for each in layouts]


def page_of(directory) -> Page:
    report([directory], directory.parent / "page.html")
    return Page(directory.parent / "page.html")


# The document


def test_hostile_names_and_values_are_escaped_and_the_page_is_self_contained(tmp_path):
    sweep = tmp_path / "<b>sweep"
    name = "<img src=x onerror=alert(1)>\udcff\n'"
    values = {"model.name": HOSTILE, "optimizer.lr": 1}
    fake_run(sweep / name, values, val_loss=1.0, overrides=[f"model.name='{HOSTILE}'"])
    others = {f"model.{HOSTILE}": 1, "model.name": "</title></style>", "optimizer.lr": 2}
    fake_run(sweep / "b", others, status=HOSTILE)
    fake_run(sweep / "c", {f"model.{HOSTILE}": 2})
    page = page_of(sweep)
    assert (page.count("script"), page.count("style"), page.count("title")) == (3, 1, 1)
    assert page.count("img") == page.count("b") == 0
    names = [name for _, values in page.tags for name in values]
    assert not [name for name in names if name.startswith("on")]
    assert not {"src", "href", "action", "data"} & {*names}
    assert "<script>alert" in page.text
    labels = re.sub("<br>|</?b>|<extra></extra>", "", json.dumps(page.figures))
    assert "&lt;script&gt;" in labels and "<" not in labels, "plotly renders some tags"
    (policy,) = (values["content"] for _, values in page.tags if "http-equiv" in values)
    start = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'nonce-"
    assert policy.startswith(start) and "http" not in policy
    assert "\x1b" not in report([sweep], tmp_path / "page.html")


def test_the_answer_comes_first_on_the_page(tmp_path):
    for number in range(6):
        values = {"optimizer.lr": 0.1 + number % 2, "model.n_layer": 1 + number % 2}
        values["run.seed"] = number // 2
        fake_run(tmp_path / "s" / f"{number}", values, val_loss=2 + number % 2 + number**2 / 100)
    page = page_of(tmp_path / "s")
    headings = ["Best configuration", "Comparison", "Loss curves", "Parameters"]
    assert page.headings == [*headings, "Groups", "Jobs", "Fixed settings"]
    assert "n_layer=1, lr=0.1 is better than n_layer=2, lr=1.1 by 1.050 ± 0.099" in page.text
    fixed = page.text[page.text.index("Fixed settings") :]
    assert "begun 2023-11-1" in fixed and "path: 'builtin:python_docs'" in fixed
    assert "weight_decay: 0.1" in fixed and "lr: " not in fixed and "seed: " not in fixed


# Several jobs


def test_jobs_are_coloured_by_objective_and_the_best_stands_out(tmp_path):
    for number, loss in enumerate([1.5, 1.6, 1.7, 1.8, 1.9, 2.0, 2.1, 60.0]):
        values = {"optimizer.lr": 1.0 + number, "model.activation": "a<b>"}
        fake_run(tmp_path / "s" / f"{number}", values, val_loss=loss)
    values = {"optimizer.lr": 50, "model.activation": "gelu"}
    fake_run(tmp_path / "s" / "pruned", values, "pruned", 1.2, steps=40)
    page = page_of(tmp_path / "s")
    titles = ["validation loss", "training loss", "activation", "learning rate"]
    assert page.titles() == titles and page.count("tr") == 1 + 9
    curves = page.figures[0]["data"][::-1]  # the best job is drawn last
    colours = [trace["line"]["color"] for trace in curves]
    assert len({*colours[:7]}) == 7 and colours[6] == colours[7] != colours[8], "one far off"
    assert [trace["line"]["dash"] for trace in curves] == ["solid"] * 8 + ["dash"]
    widths = [trace["line"]["width"] for trace in curves]
    assert widths[0] > max(widths[1:])
    hover = "validation loss 1.5<br>activation: a&lt;b&gt;<br>learning rate: 1"
    assert curves[0]["text"] == f"<b>#1</b> complete, {hover}"
    (against,) = page.figures[3]["data"]
    assert against["marker"]["symbol"] == ["circle-open", "triangle-up", *["circle"] * 7]
    assert against["y"][1] == 2.1
    assert page.figures[3]["layout"]["yaxis"]["title"]["text"] == "validation loss"
    assert "values from 1.500 to 2.100 or worse" in page.text and "not complete" in page.text


@pytest.mark.parametrize(
    ("losses", "low", "high"),
    [
        ([1.5, 1.6, 1.7, 1.8, 90.0], 1.3, 5),
        ([1.5, 1.6, 1.7, 1.8, 1e99], 1.3, 5),
        ([1.0, 9.0], 0.4, 9),
        ([2.0] * 5, 1.8, 4),
    ],
    ids=str,
)
def test_a_curve_far_above_the_others_does_not_compress_the_axis(tmp_path, losses, low, high):
    """The axis begins below the lowest loss, and ends above the first losses of most jobs."""
    for number, loss in enumerate(losses):
        run = fake_run(tmp_path / "s" / f"{number}", {"optimizer.lr": number}, val_loss=loss)
        steps = [{"step": n, "val_loss": max(4, loss) if n < 2 else loss} for n in range(9)]
        (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, steps)))
    first, last = page_of(tmp_path / "s").figures[0]["layout"]["yaxis"]["range"]
    assert low < first < min(losses) and 4 < last < 1.2 * high


def test_curves_of_any_height_and_length(tmp_path):
    """A single evaluation is drawn as a point, because a line through one point is invisible."""
    for number, loss in enumerate([1e299, -1e99, 0.0, 5e-324]):
        run = fake_run(tmp_path / "s" / f"{number}", {"optimizer.lr": loss})
        steps = [{"step": -1, "val_loss": loss}, {"step": 10**50, "train_loss": loss}]
        (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, steps)))
    fake_run(tmp_path / "s" / "long", steps=20_000)
    validation, training, _ = page_of(tmp_path / "s").figures
    assert len(validation["data"]) == 4, "a loss of 1e299 cannot be a coordinate"
    assert sorted(trace["mode"] for trace in validation["data"]) == ["lines"] + ["markers"] * 3
    long = max(training["data"], key=lambda trace: len(trace["x"]))
    assert len(long["x"]) <= 201 and long["x"][-1] == 20_000, "the last one is drawn"


def test_jobs_without_curves(tmp_path):
    fake_run(tmp_path / "s" / "a", {"optimizer.lr": 1}, None, None)
    (tmp_path / "s" / "b").mkdir()
    (tmp_path / "s" / "b" / "result.json").write_text('{"status": "complete", "val_loss": 2.5}')
    page = page_of(tmp_path / "s")
    assert page.figures == [] and page.count("tr") == 1 + 2
    (tmp_path / "s" / "b" / "result.json").write_text('{"status": "pruned"}')
    assert "No job is complete." in page_of(tmp_path / "s").text


def test_many_parameters_and_long_values(tmp_path):
    for number in range(2):
        keys = {f"model.key{key}": f"/a/long/path/of/{number}" for key in range(40)}
        fake_run(tmp_path / "s" / f"{number}", {"model.code": "mine.py", **keys})
    page = page_of(tmp_path / "s")
    assert len(page.titles()) == 2 + 12 and "the table has the other 28" in page.text
    labels = page.figures[-1]["layout"]["xaxis"]["labelalias"]
    assert len(labels) == 2 and all(len(label) <= 14 for label in labels.values())
    text = report([tmp_path / "s"], tmp_path / "page.html")
    assert "and 32 more parameters: model.key8, " in text


LR = "- optimizer.lr=tag(log,interval(1e-4,1e-1))"
PRESET = "params:\n  optimizer.lr: tag(log, interval(1e-4, 1e-1))"
UNEVEN = [0.011, 0.013, 0.04, 0.08]


@pytest.mark.parametrize(
    ("values", "multirun", "expected"),
    [
        ([0.01, 0.02, 0.04, 0.08], "", "log"),
        ([0.01, 0.02, 0.03, 0.04], "", "linear"),
        ([0.0, 1.0, 10.0], "", "linear"),
        ([0.01, 0.1], "", "linear"),
        (UNEVEN, "", "linear"),
        (UNEVEN, LR, "log"),
        (UNEVEN, PRESET, "log"),
        (UNEVEN, LR.replace("lr", "eps"), "linear"),
        ([0.0, 0.013, 0.04], LR, "linear"),
        ([5, None, True, "x", [0.9, 0.99]], "", ["5", "[0.9, 0.99]", "null", "true", "x"]),
        (["10", "9", 11], LR, ["11", "10", "9"]),
        ([1e-99, 1e99], LR, "log"),
        ([-1e99, 1e99], LR, "linear"),
    ],
    ids=str,
)
def test_the_axis_of_a_parameter(tmp_path, values, multirun, expected):
    """It is logarithmic if the search was. Each value that is not a number has its own place."""
    for number, value in enumerate(values):
        fake_run(tmp_path / "s" / f"{number}", {"optimizer.lr": value}, val_loss=2 + number / 10)
    (tmp_path / "s" / "multirun.yaml").write_text(multirun)
    figure = page_of(tmp_path / "s").figures[-1]
    axis = figure["layout"]["xaxis"]
    drawn = figure["data"][0]["x"][::-1]  # the best job is drawn last
    if isinstance(expected, str):
        assert (axis["type"], drawn) == (expected, values)
    else:
        assert axis["type"] == "category" and axis["categoryarray"] == expected
        assert sorted(drawn) == sorted(expected)


# Replicates


def test_a_band_and_whole_error_bars_for_each_recipe(tmp_path):
    """One recipe has losses of 2.0 and 2.2. The other has 1.9 and 2.5, with the best single job."""
    for lr, losses in ((0.1, (2.0, 2.2)), (0.2, (1.9, 2.5))):
        for seed, loss in enumerate(losses, start=1):
            values = {"optimizer.lr": lr, "run.seed": seed}
            fake_run(tmp_path / "s" / f"{lr}-{seed}", values, val_loss=loss)
    page = page_of(tmp_path / "s")
    curves, training, against = page.figures
    for figure in (curves, training):
        assert [trace["mode"] for trace in figure["data"]] == ["none", "lines", "none", "lines"]
    band, line = curves["data"][2:]  # the best recipe is drawn last
    assert line["y"][-1] == pytest.approx(2.1) and line["x"] == [20, 40, 60, 80, 100]
    assert band["y"][4:6] == pytest.approx([2.1 + HALF_WIDTH, 2.1 - HALF_WIDTH]), (
        "above, and back below"
    )
    assert band["fill"] == "toself" and "2 seeds" in line["text"] and "±" in line["text"]
    (points,) = against["data"]
    assert points["y"] == pytest.approx([2.2, 2.1])
    assert points["error_y"]["array"] == pytest.approx([3 * HALF_WIDTH, HALF_WIDTH])
    assert "range" not in against["layout"]["yaxis"], "plotly's own contains all bars"
    assert "Groups" in page.headings and page.count("tr") == 2 + 2 + 4
    assert "4 jobs in 2 groups" in page.text and "learning rate: 0.1" in page.text


def test_a_curve_has_the_steps_that_all_seeds_have(tmp_path):
    for seed, steps in ((1, 100), (2, 60)):
        status = None if steps < 100 else "preempted"
        fake_run(tmp_path / "s" / f"{seed}", {"run.seed": seed}, status, steps=steps)
    _, line = page_of(tmp_path / "s").figures[0]["data"]
    assert line["x"] == [20, 40, 60]


# A single run


@pytest.fixture
def run(tmp_path):
    """Write a run that was killed once after step 40, and return it."""
    run = fake_run(tmp_path / "a", {"model.name": HOSTILE})
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    again = '{"start": 1767225600.0, "step": 40, "world_size": 2}\n'
    at = next(i for i, line in enumerate(lines) if '"step": 45' in line)
    named = {"step": 100, **{f"<img src=x>{number}": 1.0 for number in range(50)}}
    more = [again, *lines[at:], json.dumps(named), "\n"]
    (run / "metrics.jsonl").write_text("".join([*lines[:at], *more]))
    samples = [{"step": 50, "text": "an early text\n  indented"}]
    samples += [{"step": 100, "text": f"the last text {HOSTILE}"}, {"step": 10**400, "text": "x"}]
    (run / "samples.jsonl").write_text("\n".join(map(json.dumps, samples)))
    code = {"files": {}, "package": {"sha256": "3f" * 32}}
    code |= {"commits": {"<b>project": "0f" * 20 + "-dirty"}}
    result = json.loads((run / "result.json").read_text())
    (run / "result.json").write_text(json.dumps({**result, "code": code}))
    return run


def test_everything_of_a_run_is_on_its_page(run):
    page = page_of(run)
    titles = ["loss", "learning rate", "gradient norm", "tokens per second"]
    assert page.titles()[:4] == titles and page.titles()[4].startswith("&lt;img src=x&gt;")
    assert len(page.figures) == 1 + 16, "no more"
    losses = [len(trace["x"]) for trace in page.figures[0]["data"]]
    assert losses == [20, 5], "training and validation loss"
    for figure in page.figures:
        assert [shape["x0"] for shape in figure["layout"]["shapes"]] == [40], "the restart"
    headings = ["Result", "Losses", "Learning rate, speed and metrics", "Samples", "Restarts"]
    assert page.headings == [*headings, "Fixed settings"]
    assert "1 job: 1 complete, 0:01:02 of training. Faults survived: 1." in page.text
    restarts = page.text[page.text.index("Restarts") : page.text.index("Fixed settings")]
    assert re.search(r"22026-01-01 .{8}402$", restarts.strip()), "the second attempt"
    assert "an early text\n  indented" in page.text and "step -x" in page.text
    assert page.text.index("the last text <script>") < page.text.index("an early text")
    assert "lr: 0.001" in page.text
    assert "code mingpt_ddp at 3f3f3f3f3f3f, <b>project at 0f0f0f0f0f0f-dirty" in page.text
    report([run, fake_run(run.parent / "b")], run / "report.html")
    assert "Jobs" in Page(run / "report.html").headings, "one of several has no page of its own"


@pytest.mark.parametrize("damage", ["missing", "damaged", "directory"])
@pytest.mark.parametrize("file", ["metrics.jsonl", "result.json", "config.yaml", "samples.jsonl"])
def test_a_missing_or_damaged_file_does_not_hide_the_rest(file, damage, run):
    (run / file).unlink()
    if damage == "damaged":
        (run / file).write_bytes(b"\xff\n" * 20)
    elif damage == "directory":
        (run / file).mkdir()
    page = page_of(run)
    shown = {
        "metrics.jsonl": "Losses" in page.headings,
        "result.json": "wall seconds" in page.text,
        "config.yaml": "lr: 0.001" in page.text,
        "samples.jsonl": "the last text" in page.text,
    }
    assert shown.pop(file) is False and all(shown.values())
    if damage == "directory":
        assert file in page.text[page.text.index("Notes") :]
