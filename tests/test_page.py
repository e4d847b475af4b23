"""The page of a record: whole for any record, safe for any name, readable in light, in dark and on a phone."""

import html
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from whet.report.cells import aligned, breakable
from whet.report.page import page, view
from whet.report.roofline import Point, box, overlap, plot

ROOT = Path(__file__).parent.parent
RECORDS = sorted((ROOT / "records").glob("*.json"))
VOID = {"meta", "wbr", "br", "hr", "img", "link", "input"}
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
NASTY = "mlp<script>&\"'"
CEILINGS = {"copy_gbs": 4153.9, "tflops": {"bfloat16": 699.76, "float16": 673.31, "float32": 50.63, "float8_e4m3fn": 1387.84}}


def module(path: str, forward: float, backward: float, flops: float = 0.0, bound="memory", optimizer: float = 0.0) -> dict:
    ms = forward + backward + optimizer
    return {
        "path": path, "forward_ms": forward, "backward_ms": backward, "optimizer_ms": optimizer, "share": ms / 200,
        "launches": 6, "kept_mib": 12.0, "flops": flops, "bytes": 5e8, "floor_ms": ms / 2, "of_roofline": 0.5, "bound": bound,
    }


def modules(layers: int = 24) -> list[dict]:
    found = []
    for i in range(layers):
        at = f"model.language_model.layers.{i}"
        found += [
            module(f"{at}.input_layernorm", 0.05, 0.11, 3e8), module(f"{at}.self_attn", 0.5, 1.3, 1e11, "compute"),
            module(f"{at}.self_attn.qkv_proj", 0.2, 0.4, 1.7e11, "compute"), module(f"{at}.mlp.act_fn", 0.1, 0.2, 5e8),
            module(f"{at}.mlp.gate_up_proj", 0.5 + i / 100, 1.1, 4e11, "compute"),
        ]
    head = [module("lm_head", 3.2, 6.9, 2e12, "compute"), module("optimizer", 0.0, 0.0, 9e9, optimizer=14.2)]
    return [*found, *head, module("embed", 0.1, 1.9), module(NASTY, 2.0, 3.0, 2e9), module("", 0.7, 0.2, 1e7, "launch")]


def finding(i: int, **more) -> dict:
    return {
        "check": "fp32_matmul", "cause": f"cause {i} in {NASTY}", "evidence": [f"evidence {i} {NASTY}", "aten::mm, 0.55 ms"],
        "fix": f"Do fix {i}", "cost_ms": 20.0, "gain_ms": 10.0, "wrong": False, "measured": True,
        "module": "model.language_model.layers.0.self_attn", "line": f"model.py:{i}", "applies": True,
    } | more


def diagnosis(**more) -> dict:
    rows = modules()
    busy = sum(r["forward_ms"] + r["backward_ms"] + r["optimizer_ms"] for r in rows)
    wrong = finding(0, wrong=True, cost_ms=None, gain_ms=None)
    fused = {"phase": "forward", "count": 24, "now_ms": 3.9, "fused_ms": 1.1, "gain_ms": 2.8, "step_ms_after": 197.2}
    return {
        "target": f"train.py:{NASTY}", "kind": "train", "sentence": f"The slowest part is {NASTY}.",
        "notes": [f"a note on {NASTY}"], "findings": [wrong, *(finding(i) for i in range(1, 8))],
        "failed": {"kv_cache": f"KeyError: {NASTY}"},
        "step": {"ms": 200.0, "low": 195.0, "high": 210.0, "samples": 12}, "busy_ms": busy, "idle_ms": 200 - busy,
        "launches": 3122, "syncs": 3, "device": "cuda", "modules": rows, "ceilings": CEILINGS,
        "kernels": [{"name": f"void at::native::kernel<{NASTY}>" * 4, "ms": 61.2, "count": 216}, {"name": "k", "ms": 0.03}],
        "memory": {"parameters": 28e9, "gradients": 28e9, NASTY: 4e9, "peak": 70e9},
        "whatif": [fused | {"chain": ["add", NASTY], "module": "layers.*", "realised_ms": None, "realised_by": ""}],
        "layers": [{"part": "norm", "ms": 3.1, "share": 0.03, "launches": 96}], "tokens_per_s": 41.2,
        "applied": {"fixes": ["Do fix 1"], "before_ms": 200.0, "after_ms": 190.0, "left": [f"cause 2 in {NASTY}"]},
    } | more


def record(measured, command: str = "whet doctor train.py:build --train") -> dict:
    machine = json.loads((ROOT / "records" / "optimize-tiny-llama-small-tf32.json").read_text())["machine"]
    return {"command": command, "machine": machine, "commit": "5190838", "at": "2026-11-15T05:17:47Z", "measured": measured}


class Page(HTMLParser):
    """A page taken apart; what is open that should be closed, or closed that is not open, raises."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]} at {self.getpos()}"
        self.open.pop()

    def handle_data(self, data):
        if "style" not in self.open:
            self.texts.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", "".join(self.texts))

    @property
    def sections(self) -> list[str]:
        return [attrs["id"] for tag, attrs in self.tags if tag == "section"]

    def all(self, tag: str) -> list[dict]:
        return [attrs for name, attrs in self.tags if name == tag]


ALL = ["findings", "applied", "breakdown", "parts", "roofline", "kernels", "memory", "whatif", "undone"]


def test_full_record_has_every_section():
    made = Page(page(record(diagnosis())))
    assert made.sections == ALL
    assert [a["href"] for a in made.all("a")] == [f"#{name}" for name in ALL]


@pytest.mark.parametrize("key", sorted(diagnosis()))
@pytest.mark.parametrize("gone", ["missing", "None", "empty"])
def test_what_is_not_there_is_left_out_and_nothing_else(key, gone):
    data = diagnosis()
    value = data.pop(key)
    if gone != "missing":
        data[key] = None if gone == "None" else type(value)()
    sections = {
        "findings": ["findings"], "modules": ["breakdown", "roofline"], "ceilings": ["roofline"], "kernels": ["kernels"],
        "memory": ["memory"], "whatif": ["whatif"], "layers": ["parts"], "applied": ["applied"],
    }
    lost = [] if key == "findings" and gone != "missing" else sections.get(key, [])
    assert Page(page(record(data))).sections == [s for s in ALL if s not in lost]


@pytest.mark.parametrize("made", [{}, {"measured": {}}, {"measured": None}, record({}), record([1])], ids="abcde")
def test_empty_record_is_a_page_without_sections(made):
    assert Page(page(made)).sections == []


def test_rows_without_figures_break_nothing():
    bare = {k: [{}] for k in ("findings", "modules", "kernels", "whatif", "layers", "plans")}
    Page(page(record(bare)))
    nan = modules(1) + [{"path": "x", "forward_ms": float("nan"), "backward_ms": float("inf"), "flops": None}]
    made = Page(page(record(diagnosis(modules=nan, step={"ms": 0.0}, idle_ms=float("nan")))))
    assert "nan" not in made.text and "inf ms" not in made.text


@pytest.mark.parametrize("path", RECORDS, ids=lambda p: p.stem)
def test_every_record_kept_here_renders(path):
    kept = json.loads(path.read_text())
    made = Page(page(kept))
    wanted = {"plans": "plans", "entries": "choices", "findings": "findings", "modules": "breakdown"}
    assert {wanted[k] for k in wanted if kept["measured"].get(k)} <= set(made.sections)


def test_optimize_says_how_much_faster_with_what():
    kept = json.loads((ROOT / "records" / "optimize-tiny-llama-small-tf32.json").read_text())
    m, made = kept["measured"], Page(page(kept))
    assert f"{m['speedup']:.2f} times as fast" in made.text and m["chosen"] in made.text
    assert len([a for a in made.all("tr") if a.get("class") == "marked"]) >= 1
    none = m | {"chosen": "before: plain eager", "speedup": 1.0}
    assert "No plan is faster" in Page(page(kept | {"measured": none})).text


@pytest.mark.parametrize("path", [None, *RECORDS], ids=lambda p: p.stem if p else "full")
def test_page_loads_nothing_and_runs_nothing(path):
    text = page(json.loads(path.read_text()) if path else record(diagnosis()))
    found = Page(text)
    names = {tag for tag, _ in found.tags}
    assert not names & {"script", "link", "img", "iframe", "object", "embed", "base", "form"}
    assert not re.search(r"https?://|@import|url\(|\ssrc=|javascript:", text)
    assert not [key for _, attrs in found.tags for key in attrs if key.startswith("on") or key == "src"]


def test_names_are_text_never_markup():
    text = page(record(diagnosis(), command=f"whet doctor {NASTY}"))
    assert NASTY not in text and "<script" not in text
    assert Page(text).text.count("mlp<script>&") > 20


def test_page_says_its_language_title_and_headings_in_order():
    found = Page(page(record(diagnosis())))
    assert found.all("html") == [{"lang": "en"}]
    assert "viewport" in [a.get("name") for a in found.all("meta")]
    levels = [int(tag[1]) for tag, _ in found.tags if re.fullmatch(r"h\d", tag)]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(later - earlier <= 1 for earlier, later in zip(levels, levels[1:]))
    assert all(a.get("scope") in ("col", "row") for a in found.all("th"))
    assert len(found.all("figcaption")) == len(found.all("figure")) == 3
    ids = [a["id"] for _, a in found.tags if "id" in a]
    assert len(ids) == len(set(ids))


def test_findings_keep_their_order_and_the_wrong_one_is_marked():
    found = Page(page(record(diagnosis())))
    assert [i for i in range(8) if f"{i + 1}. cause {i} in" in found.text] == list(range(8))
    assert [a["class"] for a in found.all("article")] == ["finding wrong"] + ["finding"] * 7
    assert "Wrong result" in found.text and "Costs 20.0 ms, 10% of the step" in found.text
    assert "10.0 ms, 5% of the step" in found.text and "measured here" in found.text


def test_no_findings_is_said_and_not_looked_is_not():
    clean = Page(page(record(diagnosis(findings=[], checks=13, unseen="the data")))).text
    assert "No problem found by 13 checks." in clean and "any check: the data." in clean
    assert "No problem found" not in Page(page(record({"target": "x"}))).text


def test_costs_that_overlap_are_said_to():
    assert "they overlap" in Page(page(record(diagnosis(overlap="they overlap")))).text


def test_many_layers_of_one_kind_share_a_row_that_unfolds():
    shown = view(record(diagnosis()))["breakdown"]["bars"]
    counts = {str(b["name"].replace("<wbr>", "")): (b["count"], len(b["members"])) for b in shown}
    assert counts["model.language_model.layers.*.self_attn"] == (24, 24)
    assert counts["lm_head"] == (1, 0)
    few = view(record(diagnosis(modules=[module(f"blocks.{i}", 1.0, 2.0) for i in range(4)])))["breakdown"]["bars"]
    assert [b["count"] for b in few] == [1] * 4
    folded = view(record(diagnosis(modules=[module("blocks.*", 1.0, 2.0) | {"count": 8}])))["breakdown"]["bars"]
    assert [(b["count"], b["members"]) for b in folded] == [(8, [])]


def test_sums_of_phases_are_shown_only_where_no_row_counts_anothers_work():
    data = diagnosis()
    assert "optimizer 14.2 ms" in view(record(data))["breakdown"]["sums"]
    assert view(record(data | {"busy_ms": data["busy_ms"] / 2}))["breakdown"]["sums"] == ""


def test_bars_never_leave_their_box():
    made = view(record(diagnosis()))["breakdown"]
    rows = made["bars"] + [m for b in made["bars"] for m in b["members"]]
    assert all(sum(width for _, width, _ in b["widths"]) <= 100.1 for b in rows) and made["idle"]["width"] <= 100


def texts_of(p: dict) -> list[tuple[str, list[tuple]]]:
    """Every text of a plot with the boxes that it fills."""
    ticks = [(text, [box(at, p["bottom"] + 10, text, "middle")]) for _, text, at in p["x_ticks"]]
    ticks += [(text, [box(p["left"] - 5, y, text, "end")]) for y, text in p["y_ticks"]]
    middle = (p["top"] + p["bottom"]) / 2
    axes = [("across", [box((p["left"] + p["right"]) / 2, p["height"] - 10, "flops per byte", "middle")])]
    axes += [("up", [(2, middle - 25, 12, middle + 25)])]
    return [*p["texts"], *ticks, *axes]


def check_texts(p: dict) -> None:
    """No text covers another or a point, and none leaves the picture."""
    texts = texts_of(p)
    places = {m["number"]: (m["x"] - m["r"], m["y"] - m["r"], m["x"] + m["r"], m["y"] + m["r"]) for m in p["marks"]}
    for i, (text, boxes) in enumerate(texts):
        others = [(name, b) for name, more in texts[i + 1:] for b in more] + list(places.items())
        assert not [(text, name) for name, other in others for b in boxes if overlap(b, other)]
        assert all(b[0] >= 0 and b[1] >= 0 and b[2] <= p["width"] and b[3] <= p["height"] for b in boxes), text
    assert len(p["texts"]) == 1 + len(p["names"]) + len(p["marks"]), "each has its text"
    labels = [*p["names"], *(m["label"] for m in p["marks"])]
    drawn = {t["text"]: box(t["x"], t["y"] - 4, t["text"], t.get("anchor", "end")) for t in labels}
    assert all(boxes == [pytest.approx(drawn[text], abs=0.2)] for text, boxes in p["texts"] if text in drawn)


@pytest.mark.parametrize("width, named", [(1000, True), (330, False)], ids=["wide", "narrow"])
def test_roofline_texts_stay_inside_and_off_one_another(width, named):
    points = [Point(f"layers.*.part_{i} x24", 1.0 + i, 100 + 30 * (i % 7), 200 + 9 * i, 0.4, "compute") for i in range(10)]
    made = plot(points, CEILINGS, width, 480, named)
    check_texts(made)
    places = [(m["x"], m["y"]) for m in made["marks"]]
    assert all(made["left"] <= x <= made["right"] and made["top"] <= y <= made["bottom"] for x, y in places)


@pytest.mark.parametrize("path", RECORDS, ids=lambda p: p.stem)
def test_roofline_texts_of_every_record_are_clear_of_one_another(path):
    found = view(json.loads(path.read_text()))["roofline"]
    for _, drawn in found["plots"] if found else []:
        check_texts(drawn)


def test_the_text_check_sees_a_label_that_is_moved_onto_another():
    points = [Point("a", 1.0, 10.0, 5.0, None, "memory"), Point("b", 1.0, 20.0, 9.0, None, "memory")]
    made = plot(points, CEILINGS, 330, 340, False)
    check_texts(made)
    made["texts"][-1] = (made["texts"][-1][0], made["texts"][-2][1])
    with pytest.raises(AssertionError):
        check_texts(made)


def test_roofline_roofs_meet_at_the_ridge():
    point, roofs = Point("mm", 1.0, 10.0, 5.0, None, "compute"), {"copy_gbs": 1000.0, "tflops": {"float32": 50.0}}
    made = plot([point], roofs, 1000, 480, True)
    assert (made["memory"]["x2"], made["memory"]["y2"]) == (made["roofs"][0]["x1"], made["roofs"][0]["y"])
    assert plot([], roofs, 1000, 480, True) is None and plot([point], {}, 1000, 480, True) is None


def test_figures_of_a_column_share_their_decimals():
    assert aligned([37.06, 2.618, None]) == ["37.06", "2.62", "-"]
    assert aligned([0.0025, 0.29]) == ["0.0025", "0.2900"]
    assert aligned([12345.6, 0.5]) == ["12,346", "0"]
    assert aligned([None, 0.0]) == ["-", "0"] and aligned([]) == []


def test_every_table_scrolls_and_shows_at_its_edge_that_it_goes_on():
    """The covers lie on the table (local) and the shades on its frame (scroll), so a shade shows where there is more."""
    text = page(record(diagnosis()))
    assert text.count("<table") == text.count('<div class="scroll"') > 3
    rule = re.search(r"\.scroll \{(.*?)\}", text, re.S)[1]
    assert "overflow-x: auto" in rule and "background-attachment: local, local, scroll, scroll" in rule
    assert rule.count("linear-gradient") == 4 and rule.count("var(--shade)") == 2


def test_long_names_may_break_and_short_ones_may_not():
    assert breakable("with torch.compile") == "with torch.compile"
    assert breakable("model.layers.0.self_attn.q_proj<T>").count("<wbr>") >= 4
    assert breakable("a.b<" * 8).replace("<wbr>", "") == html.escape("a.b<" * 8)


def luminance(colour: str) -> float:
    parts = [int(colour[i:i + 2], 16) / 255 for i in (1, 3, 5)]
    r, g, b = (p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def contrast(a: str, b: str) -> float:
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_have_the_contrast_that_wcag_asks_for(scheme):
    """4.5 for text, 3 for what is drawn."""
    light, dark = (ROOT / "whet" / "report" / "page.html.j2").read_text().split("prefers-color-scheme: dark", 1)
    colours = dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", light if scheme == "light" else dark))
    for text in ("text", "muted", "link"):
        assert contrast(colours[text], colours["back"]) >= 4.5 and contrast(colours[text], colours["card"]) >= 4.5, text
    assert contrast(colours["text"], colours["marked"]) >= 4.5 and contrast(colours["wrong"], colours["card"]) >= 4.5
    for drawn in ("forward", "backward", "optimizer", "idle"):
        assert contrast(colours[drawn], colours["back"]) >= 3, drawn


def test_wheel_carries_the_template():
    assert re.search(r'"whet\.report" = \["\*\.j2"\]', (ROOT / "pyproject.toml").read_text())


def browse(tmp_path: Path, text: str, width: int, dark: bool) -> tuple[str, str]:
    """What a browser makes of a page that is so wide: 'asked width, page's width, back colour', and its console."""
    tell = "let d = f.contentDocument; out.textContent = [f.clientWidth, d.documentElement.scrollWidth, " \
        "d.defaultView.getComputedStyle(d.body).backgroundColor].join('; ')"
    frame = f'<iframe id="f" style="border:0;width:{width}px;height:900px" srcdoc="{html.escape(text)}"></iframe>'
    around = f'{frame}<p id="out"></p><script>f.onload = () => {{ {tell} }}</script>'
    path = tmp_path / "frame.html"
    path.write_text(around, encoding="utf-8")
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr", "--dump-dom"]
    flags += [f"--user-data-dir={tmp_path / 'profile'}", f"--blink-settings=preferredColorScheme={0 if dark else 1}"]
    said = subprocess.run([CHROMIUM, *flags, path.as_uri()], capture_output=True, text=True, timeout=120)
    return re.search(r'<p id="out">(.*?)</p>', said.stdout).group(1), said.stderr


browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed to lay the page out")


@browser
def test_browser_sees_what_is_too_wide_and_what_is_said_on_the_console(tmp_path):
    found, said = browse(tmp_path, "<p style='width:500px'>wide</p><script>console.error('wrong')</script>", 360, False)
    assert int(found.split("; ")[1]) > 360 and "CONSOLE" in said


@browser
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("name", ["doctor", "unfolded", "optimize"])
def test_browser_lays_it_out_on_a_phone_without_sideways_scrolling(tmp_path, name, dark):
    kept = json.loads((ROOT / "records" / "optimize-tiny-llama-small-float32.json").read_text())
    text = page(kept if name == "optimize" else record(diagnosis()))
    found, said = browse(tmp_path, text.replace("<details", "<details open") if name == "unfolded" else text, 360, dark)
    asked, width, back = found.split("; ")
    assert (asked, width) == ("360", "360")
    assert back == ("rgb(21, 23, 26)" if dark else "rgb(251, 251, 250)")
    assert "CONSOLE" not in said
