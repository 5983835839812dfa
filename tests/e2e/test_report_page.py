"""Check a report's page in headless Chromium: it renders, reacts to the user, and runs no data."""

from __future__ import annotations

import json

import pytest
from browser import Browser
from fake_runs import fake_run
from launching import wait_for

from mingpt_ddp.study.results.report import report, write_page
from mingpt_ddp.study.results.results import read_results

pytestmark = pytest.mark.integration
JOBS = 100
SMALL = {"width": 1000, "height": 500, "deviceScaleFactor": 1, "mobile": False}
FIGURES = 2 + 8  # two plots of curves, and the objective against each of eight parameters
# Returns the axis labels that overlap, as text for a failure message.
OVERLAPPING = """[...document.querySelectorAll(".plot")].flatMap(plot => {
  const boxes = [...plot.querySelectorAll(".xtick text, .ytick text, .annotation-text, .xtitle, .ytitle, .gtitle")]
    .map(text => [text.textContent, text.getAttribute("transform") || "", text.getBoundingClientRect()])
    .filter(([_, transform]) => !/rotate\\((?!0|-90)/.test(transform));
  return boxes.flatMap(([one, _, a], i) => boxes.slice(i + 1).filter(([_, __, b]) => Math.min(a.right, b.right) -
    Math.max(a.left, b.left) > 1 && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 3).map(([other]) =>
    `${one} and ${other}`));
})"""  # noqa: E501

# The brightness of the page, and the lowest WCAG contrast of texts, labels and lines with it.
CONTRAST = """(() => {
  const linear = v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = css => css.match(/[0-9.]+/g).slice(0, 3).map(v => linear(v / 255)).reduce(
    (sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const page = light(getComputedStyle(document.body).backgroundColor);
  const to = css => (Math.max(light(css), page) + 0.05) / (Math.min(light(css), page) + 0.05);
  const least = (selector, of) => Math.min(
    ...[...document.querySelectorAll(selector)].map(element => to(getComputedStyle(element)[of])));
  return [page, least("p, td, h1, h2", "color"), least(".plot text", "fill"), least(".js-line", "stroke")];
})()"""  # noqa: E501


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Write the page of one run. Its texts contain markup."""
    script = "<script>stolen = 6</script><img src=http://127.0.0.1:9/ onerror='stolen = 7'>"
    run = fake_run(tmp_path_factory.mktemp("run") / "a<b>", {"model.name": script}, faults=2)
    with open(run / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": 100, f"val_{script}": 1.0}) + "\n")
    (run / "samples.jsonl").write_text(json.dumps({"step": 100, "text": script}))
    report([run], run / "report.html")
    return run / "report.html"


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """Write the page of many jobs of all kinds. Their names and values contain markup."""
    root = tmp_path_factory.mktemp("sweep") / "<script>stolen = 1<"
    statuses = [*["complete"] * 7, "pruned", "preempted", None]
    for number in range(JOBS):
        values = {
            "optimizer.lr": 10 ** (-4 + 0.03 * number),
            "optimizer.betas": [0.9, 0.95 + 0.01 * (number % 3)],
            "model.activation": ["gelu", "<img src=http://127.0.0.1:9/ onerror='stolen = 2'>" * 3][
                number % 2
            ],
            "model.n_layer": 1 + number % 4,
            "optimizer.weight_decay": [0.0, 0.001, 0.002, 0.1][number % 4],
            "trainer.batch_size": [8, 12, 16, 24, 64, 128][number % 6],
            "data.path": f"/a/rather/long/path/of/a/text/{number % 5}",
            # This version need not know the keys of a user's optimizer.
            "optimizer.code": "mine.py",
        }
        if number % 7 == 0:
            values["optimizer.a_parameter_with_a_name_that_is_far_too_long_for_any_axis"] = number
        loss = 90.0 if number == 50 else None if number == 49 else 1.5 + (number % 13) / 20
        status = "complete" if number == 50 else statuses[number % 10]
        fake_run(root / f"job{number}'\"><script>stolen = 3</script>", values, status, loss)
    report([root], root.parent / "report.html")
    return root.parent / "report.html"


def counted(browser: Browser, selector: str) -> int:
    return browser.evaluate(f"document.querySelectorAll({selector!r}).length")


@pytest.fixture
def narrow(browser):
    use_width(browser, 390)
    yield browser
    browser.call("Emulation.clearDeviceMetricsOverride")


def use_scheme(browser: Browser, scheme: str) -> None:
    browser.call(
        "Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}]
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everything_is_drawn_and_no_data_is_executed(browser, sweep, scheme):
    use_scheme(browser, scheme)
    browser.open(sweep)
    assert browser.errors() == []
    assert browser.requested() == [sweep.as_uri()]
    assert browser.evaluate("typeof stolen") == "undefined"
    assert counted(browser, ".js-plotly-plot") == FIGURES
    assert counted(browser, ".plot a, .plot image, .plot img") == 0
    measured = JOBS - 1  # one job has no loss
    assert counted(browser, ".plots .js-line") == 2 * measured
    assert counted(browser, "tbody tr") == JOBS
    sizes = (
        "[...document.querySelectorAll('.plots .js-line')].map(e => e.getBBox()).map(b "
        "=> [b.width, b.height])"
    )
    drawn = sum(width > 50 and height > 10 for width, height in browser.evaluate(sizes))
    assert drawn >= 2 * (measured - 1), "a loss far above the others may lie outside the plot"
    assert browser.evaluate(OVERLAPPING) == []
    assert browser.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


def test_the_page_fits_a_phone(narrow, sweep):
    narrow.open(sweep)
    assert narrow.errors() == []
    assert narrow.evaluate("document.documentElement.scrollWidth") == 390
    widths = narrow.evaluate(
        "[...document.querySelectorAll('.plots .main-svg')].map(e => "
        "e.getBoundingClientRect().width)"
    )
    assert widths and all(300 < width <= 390 for width in widths)
    assert narrow.evaluate(OVERLAPPING) == []


def test_light_and_dark_are_readable(browser, sweep):
    """The WCAG contrast with the page is at least 4.5 for text, and 2.5 for every line."""
    pages = []
    for scheme in ("light", "dark"):
        use_scheme(browser, scheme)
        browser.open(sweep)
        page, text, labels, lines = browser.evaluate(CONTRAST)
        pages.append(page)
        assert min(text, labels) >= 4.5
        assert lines >= 2.5
    assert pages[0] > 0.9 and pages[1] < 0.02


def use_width(browser, width):
    """Show pages on a screen of this width. A width below 800 pixels means a phone."""
    browser.call(
        "Emulation.setDeviceMetricsOverride",
        width=width,
        height=800,
        deviceScaleFactor=1,
        mobile=width < 800,
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1400])
def test_the_page_of_a_run(browser, run, scheme, width):
    use_scheme(browser, scheme)
    use_width(browser, width)
    browser.open(run)
    assert browser.errors() == browser.evaluate(OVERLAPPING) == []
    assert browser.requested() == [run.as_uri()]
    assert browser.evaluate("typeof stolen") == "undefined"
    assert counted(browser, ".js-plotly-plot") == 1 + 4
    assert counted(browser, ".js-line") >= 2 + 3
    assert counted(browser, "a, img, .plot image") == 0
    assert browser.evaluate("document.documentElement.scrollWidth") == width
    page, text, labels, lines = browser.evaluate(CONTRAST)
    assert (page > 0.9) == (scheme == "light")
    assert min(text, labels) >= 4.5 and lines >= 2.5
    browser.call("Emulation.clearDeviceMetricsOverride")


@pytest.fixture(scope="module")
def replicates(tmp_path_factory):
    """Write the page of twelve recipes with three seeds each."""
    root = tmp_path_factory.mktemp("replicates")
    for number in range(36):
        values = {
            "optimizer.lr": 10.0 ** -(1 + number // 3 % 4),
            "model.name": ["gelu", "<b>relu", "silu"][number // 12],
            "run.seed": number % 3,
        }
        loss = 2 + number // 3 % 5 / 10 + (number * 7 % 5) / 100
        fake_run(root / "sweep" / f"{number}", values, val_loss=loss)
    report([root / "sweep"], root / "page.html")
    return root / "page.html"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1400])
def test_the_page_of_replicates(browser, replicates, scheme, width):
    use_scheme(browser, scheme)
    use_width(browser, width)
    browser.open(replicates)
    assert browser.errors() == browser.evaluate(OVERLAPPING) == []
    assert browser.requested() == [replicates.as_uri()]
    assert counted(browser, "tbody tr") == 12 + 36
    assert counted(browser, ".plots .js-fill") == 2 * 12, "a band around each curve"
    assert counted(browser, ".errorbar") == 2 * 12
    assert counted(browser, "p b, .plot b") == 0
    assert browser.evaluate("document.documentElement.scrollWidth") == width
    _, text, labels, lines = browser.evaluate(CONTRAST)
    assert min(text, labels) >= 4.5 and lines >= 2.5
    browser.call("Emulation.clearDeviceMetricsOverride")


def test_a_point_shows_the_parameters_of_its_job(browser, sweep):
    browser.open(sweep)
    position = """(() => {
      const marker = [...document.querySelectorAll(".scatterlayer .points path")].pop();
      marker.scrollIntoView({block: "center"});
      const box = marker.getBoundingClientRect();
      return [box.x + box.width / 2, box.y + box.height / 2];
    })()"""
    browser.point_at(*browser.evaluate(position))
    shown = """(async () => {
      for (let i = 0; i < 1000 && !document.querySelector(".hovertext"); i++) await new Promise(r => setTimeout(r, 10));
      return document.querySelector(".hovertext").textContent;
    })()"""  # noqa: E501
    text = browser.evaluate(shown)
    assert (
        text.startswith("#")
        and "validation loss" in text
        and "learning rate: " in text
        and "betas: [0.9, " in text
    )
    assert browser.evaluate("typeof stolen") == "undefined"
    assert browser.errors() == []


def test_columns_sort_by_value_with_empty_cells_last(browser, sweep):
    browser.open(sweep)
    click = (
        "[...document.querySelectorAll('th button')].find(b => b.textContent === "
        "'validation loss').click()"
    )
    losses = "[...document.querySelectorAll('tbody tr')].map(row => row.cells[1].textContent)"
    orders = []
    for _ in range(2):
        browser.evaluate(click)
        orders.append(browser.evaluate(losses))
    up, down = ([float(text.strip("()")) for text in order if text != "-"] for order in orders)
    assert up == sorted(up) and down == up[::-1] and max(up) == 90.0
    assert [order[-1] for order in orders] == ["-", "-"]
    assert browser.errors() == []


def test_a_page_of_jobs_that_run_reloads_and_keeps_what_the_reader_has_chosen(browser, tmp_path):
    for number in range(4):
        fake_run(tmp_path / f"job{number}", {"optimizer.lr": 1.0 + number}, val_loss=2 + number / 9)
    page = tmp_path / "report.html"
    write_page(read_results([tmp_path]), page, reload_s=3600)
    browser.call("Emulation.setDeviceMetricsOverride", **SMALL)
    browser.open(page)
    choose = """(() => {
      const rows = [...document.querySelectorAll("tbody tr")];
      rows.find(row => row.textContent.includes("job2")).querySelector("td").click();
      [...document.querySelectorAll("th button")][3].click();
      [...document.querySelectorAll("th button")][3].click();
      Plotly.relayout(plots[0], {"xaxis.range[0]": 20, "xaxis.range[1]": 60});
      scrollTo(0, 300);
    })()"""
    browser.evaluate(choose)
    fake_run(tmp_path / "best", {"optimizer.lr": 9.0}, val_loss=1.5)
    write_page(read_results([tmp_path]), page, reload_s=0.05)
    browser.evaluate("setTimeout(reload)")
    write_page(read_results([tmp_path]), page)
    wait_for(lambda: is_last_page(browser), what="the last page")
    assert browser.errors() == []
    assert counted(browser, "tbody tr") == 5, "a new page"
    assert counted(browser, "tr.chosen") == 1
    assert browser.evaluate("document.querySelector('tr.chosen').textContent").endswith("job2")
    opacities = browser.evaluate("plots[0].data.map(trace => trace.opacity)")
    assert sorted(opacities) == [0.12] * 4 + [1], "the others step back"
    assert browser.evaluate("plots[0].layout.xaxis.range") == [20, 60]
    assert browser.evaluate("headings.map(each => each.ariaSort)")[3] == "descending"
    assert browser.evaluate("scrollY") == 300
    browser.evaluate("document.querySelector('tr.chosen td').click()")
    assert browser.evaluate("plots[0].data.map(trace => trace.opacity)") == [1] * 5
    browser.call("Emulation.clearDeviceMetricsOverride")


def is_last_page(browser: Browser) -> bool:
    """Return True if the loaded page does not reload itself any more."""
    try:
        return browser.evaluate("reloadMs === 0 && document.readyState === 'complete'")
    except AssertionError:  # no page is loaded during a reload
        return False


def test_small_pages(browser, tmp_path):
    fake_run(tmp_path / "one" / "job")
    fake_run(tmp_path / "nothing" / "job", status=None, val_loss=None)
    for name in ("one", "nothing"):
        report([tmp_path / name], tmp_path / "page.html")
        browser.open(tmp_path / "page.html")
        assert browser.errors() == browser.evaluate(OVERLAPPING) == []
        assert counted(browser, "tbody tr") == 3 * (name == "one"), "the numbers of the result"
        assert counted(browser, ".js-plotly-plot") == 4 * (name == "one")


def test_extreme_numbers_are_drawn(browser, tmp_path):
    for number, loss in enumerate([9e99, -9e99, 0.0, 5e-324]):
        run = fake_run(tmp_path / f"{number}", {"optimizer.lr": loss}, val_loss=loss)
        steps = f'{{"step": -1, "val_loss": {loss}}}\n{{"step": {10**99}, "train_loss": {loss}}}'
        (run / "metrics.jsonl").write_text(steps)
    report([tmp_path], tmp_path / "page.html")
    browser.open(tmp_path / "page.html")
    assert browser.errors() == []
    assert counted(browser, ".js-plotly-plot") == 3


def test_markup_added_to_the_page_is_not_executed(browser, sweep, tmp_path):
    """The content security policy blocks markup that was not escaped.

    The errors that the browser reports here also show that the other tests can fail.
    """
    added = "<script>stolen = 4</script><img src='http://127.0.0.1:9/x.png' onerror='stolen = 5'>"
    page = tmp_path / "page.html"
    page.write_text(sweep.read_text().replace("<h1>", f"{added}<h1>"))
    browser.open(page)
    assert browser.evaluate("typeof stolen") == "undefined"
    errors = " ".join(browser.errors())
    assert all(directive in errors for directive in ("script-src", "img-src"))
