"""The page of a report in a real browser: it is drawn, it answers, and it obeys nobody but itself."""

from __future__ import annotations

import pytest
from browser import Browser, chromium
from fake_runs import made_up

from mingpt_ddp.sweeps.report import report

JOBS = 100
# What lies outside of its drawing, and labels that run into each other; both as texts to read in a failure.
MISPLACED = """[...document.querySelectorAll("svg")].flatMap(svg => {
  const room = svg.getBoundingClientRect();
  return [...svg.querySelectorAll("text, path.line, .dot, line")].filter(element => {
    const box = element.getBoundingClientRect();
    const clipped = element.closest("[clip-path]");
    return !clipped && (box.left < room.left - 1 || box.right > room.right + 1 || box.top < room.top - 1 ||
      box.bottom > room.bottom + 1) || element.tagName === "text" && box.width === 0;
  }).map(element => `${svg.getAttribute("aria-label")}: ${element.outerHTML}`);
})"""
OVERLAPPING = """[...document.querySelectorAll("svg")].flatMap(svg => {
  const boxes = [...svg.querySelectorAll("text")].map(text => [text.textContent, text.getBoundingClientRect()]);
  return boxes.flatMap(([one, a], i) => boxes.slice(i + 1).filter(([_, b]) => Math.min(a.right, b.right) -
    Math.max(a.left, b.left) > 1 && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 3).map(([other]) =>
    `${svg.getAttribute("aria-label")}: ${one} and ${other}`));
})"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if chromium() is None:
        pytest.skip("there is no Chromium; apt-get install chromium-headless-shell, or chromium")
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """The page of many jobs, of all kinds, with names and values that would like to be more than text."""
    root = tmp_path_factory.mktemp("sweep") / "<script>stolen = 1<"
    statuses = [*["complete"] * 7, "pruned", "preempted", None]
    for number in range(JOBS):
        values = {
            "optimizer.lr": 10 ** (-4 + 0.03 * number),
            "optimizer.betas": [0.9, 0.95 + 0.01 * (number % 3)],
            "model.activation": ["gelu", "<img src=http://127.0.0.1:9/ onerror='stolen = 2'>" * 3][number % 2],
            "model.n_layer": 1 + number % 4,
            "optimizer.weight_decay": [0.0, 0.001, 0.002, 0.1][number % 4],
            "trainer.batch_size": [8, 12, 16, 24, 64, 128][number % 6],
            "data.path": f"/a/rather/long/path/of/a/text/{number % 5}",
        }
        if number % 7 == 0:
            values["optimizer.a_parameter_with_a_name_that_is_far_too_long_for_any_axis"] = number
        loss = 90.0 if number == 50 else None if number == 49 else 1.5 + (number % 13) / 20
        status = "complete" if number == 50 else statuses[number % 10]
        made_up(root / f"job{number}'\"><script>stolen = 3</script>", values, status, loss)
    report([root], root.parent / "report.html")
    return root.parent / "report.html"


def counted(browser: Browser, selector: str) -> int:
    return browser.evaluate(f"document.querySelectorAll({selector!r}).length")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everything_is_drawn_and_nothing_runs_into_anything(browser, sweep, scheme):
    browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    browser.open(sweep)
    assert browser.complaints() == []
    assert browser.requested() == [sweep.as_uri()]
    assert browser.evaluate("typeof stolen") == "undefined"
    assert counted(browser, "svg.curves") == 2
    measured = JOBS - 1  # one has no loss at all
    assert counted(browser, "svg.curves g.job path.line") == 2 * measured
    assert counted(browser, "svg.against") == 8
    assert counted(browser, "svg.parallel path.line") == JOBS
    assert counted(browser, "tbody tr") == JOBS
    sizes = "[...document.querySelectorAll('svg.curves path.line')].map(e => e.getBBox()).map(b => [b.width, b.height])"
    assert all(width > 50 and height > 10 for width, height in browser.evaluate(sizes))
    assert browser.evaluate(MISPLACED) == []
    assert browser.evaluate(OVERLAPPING) == []
    assert browser.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


def test_light_and_dark_are_readable(browser, sweep):
    """WCAG's contrast: 4.5 for text, and enough to tell every line from the page."""
    contrast = """(() => {
      const linear = v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
      const light = css => css.match(/[0-9.]+/g).slice(0, 3).map(v => linear(v / 255)).reduce(
        (sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
      const page = light(getComputedStyle(document.body).backgroundColor);
      const to = css => (Math.max(light(css), page) + 0.05) / (Math.min(light(css), page) + 0.05);
      const least = (selector, of) => Math.min(
        ...[...document.querySelectorAll(selector)].map(element => to(getComputedStyle(element)[of])));
      return [page, least("p, td, h1, h2", "color"), least("svg text", "fill"), least("svg path.line", "stroke")];
    })()"""
    # Wide enough for a line that passes above the decimal point of a label: 0.001 looked like 0:001.
    halo = """[...document.querySelectorAll("svg.parallel text.halo")].map(e => getComputedStyle(e)).map(style =>
      style.paintOrder.startsWith("stroke") && parseFloat(style.strokeWidth) >= 8 &&
      style.stroke === getComputedStyle(document.body).backgroundColor)"""
    pages = []
    for scheme in ("light", "dark"):
        browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        browser.open(sweep)
        page, text, labels, lines = browser.evaluate(contrast)
        halos = browser.evaluate(halo)
        pages.append(page)
        assert min(text, labels) >= 4.5
        assert lines >= 1.6
        assert halos and all(halos)
    assert pages[0] > 0.9 and pages[1] < 0.02


def test_a_job_stands_out_everywhere(browser, sweep):
    browser.open(sweep)
    place = """(() => {
      const dot = document.querySelector("svg.against circle.best");
      dot.scrollIntoView({block: "center"});
      const box = dot.getBoundingClientRect();
      return [box.x + box.width / 2, box.y + box.height / 2];
    })()"""
    browser.point_at(*browser.evaluate(place))
    assert counted(browser, ".on") == counted(browser, "[data-job='1']:not(.hit)") == 2 + 8 + 1 + 1
    assert counted(browser, "svg:has(.on), tr.on") == 2 + 8 + 1 + 1
    assert browser.evaluate("document.querySelector('#tip').textContent").startswith("#1 ")
    assert not browser.evaluate("document.querySelector('#tip').hidden")
    browser.point_at(2, 2)
    assert counted(browser, ".on") == 0
    assert browser.evaluate("document.querySelector('#tip').hidden")
    assert browser.complaints() == []


def test_columns_sort_by_size_and_what_is_empty_comes_last(browser, sweep):
    browser.open(sweep)
    click = "[...document.querySelectorAll('th button')].find(b => b.textContent === 'validation loss').click()"
    losses = "[...document.querySelectorAll('tbody tr')].map(row => row.cells[1].dataset.value)"
    orders = []
    for _ in range(2):
        browser.evaluate(click)
        orders.append(browser.evaluate(losses))
    up, down = ([float(value) for value in order if value is not None] for order in orders)
    assert up == sorted(up) and down == up[::-1] and max(up) == 90.0
    assert [order[-1] for order in orders] == [None, None]
    assert browser.complaints() == []


def test_the_command_is_copied_or_else_marked(browser, sweep):
    browser.open(sweep)
    pressed = """(async () => {
      const button = document.querySelector("#copy");
      button.click();
      while (button.textContent === "Copy") await new Promise(resolve => setTimeout(resolve, 5));
      return [button.textContent, getSelection().toString()];
    })()"""
    told, marked = browser.evaluate(pressed)
    assert told == "Copied" or (told == "Marked" and marked.startswith("python main.py "))
    assert browser.complaints() == []


def test_small_pages(browser, tmp_path):
    made_up(tmp_path / "one" / "job")
    made_up(tmp_path / "nothing" / "job", status=None, val_loss=None)
    for name in ("one", "nothing"):
        report([tmp_path / name], tmp_path / "page.html")
        browser.open(tmp_path / "page.html")
        assert browser.complaints() == browser.evaluate(MISPLACED) == browser.evaluate(OVERLAPPING) == []
        assert counted(browser, "tbody tr") == 1
        assert counted(browser, "svg") == 2 * (name == "one")


def test_whatever_is_added_to_the_page_does_not_run(browser, sweep, tmp_path):
    """Should a name ever get through as markup; it also shows that these tests would notice."""
    added = "<script>stolen = 4</script><img src='http://127.0.0.1:9/x.png'><p onclick='1' style='color: red'>"
    page = tmp_path / "page.html"
    page.write_text(sweep.read_text().replace("<h1>", f"{added}<h1>"))
    browser.open(page)
    assert browser.evaluate("typeof stolen") == "undefined"
    complaints = " ".join(browser.complaints())
    assert all(word in complaints for word in ("script-src", "img-src", "style-src"))
