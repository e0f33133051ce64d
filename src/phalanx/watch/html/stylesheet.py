"""The style sheet of a report. Its colours are those of the page."""

from __future__ import annotations

from phalanx.watch.charts import svg, timeline


def style() -> str:
    """Return the style sheet with those of the charts."""
    return (
        ":root{color-scheme:light dark;--ink:#1e2227;--soft:#5b626c;--paper:#fffdfa;--line:#e5e0d6;--box:#f3f0e9}"
        "@media (prefers-color-scheme:dark){"
        ":root{--ink:#e9e6df;--soft:#a3a9b1;--paper:#0f1215;--line:#2b3138;--box:#20252b}}"
        "body{margin:0;background:var(--paper);color:var(--ink);font:15px/1.5 system-ui,sans-serif}"
        "main#report,footer{max-width:60rem;margin:0 auto;padding:1rem}"
        "#report h1{font-size:1.5rem;overflow-wrap:anywhere}#report h2{font-size:1.15rem;margin-top:2rem}"
        "#report h3{font-size:1rem}"
        ".state{font-size:.85rem;padding:.15rem .6rem;border-radius:1rem;vertical-align:middle;color:#fff}"
        ".state.good{background:#17704b}.state.going{background:#2458ad}.state.bad{background:#a3213f}.state.calm{background:#5b626c}"
        ".tiles{display:flex;flex-wrap:wrap;gap:.5rem}"
        ".tiles div{background:var(--box);border-radius:.5rem;padding:.5rem .9rem;min-width:5rem}"
        ".tiles b{display:block;font-size:1.2rem}"
        ".tiles span,.note,footer,figcaption{color:var(--soft);font-size:.85rem}"
        "figure{margin:1rem 0;overflow-x:auto}figure svg{width:100%;min-width:32rem;height:auto;display:block}"
        ".wide{overflow-x:auto}table{border-collapse:collapse;font-size:.9rem;width:100%}"
        "th,td{text-align:left;padding:.3rem .6rem;border-bottom:1px solid var(--line);vertical-align:top}"
        ".number{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}"
        "dl{display:grid;grid-template-columns:max-content 1fr;gap:.2rem 1rem}dt{color:var(--soft)}"
        "dd{margin:0;overflow-wrap:anywhere}"
        "pre{background:var(--box);padding:.8rem;border-radius:.5rem;overflow:auto;max-height:30rem;font-size:.8rem}"
        "details{margin:.6rem 0}summary{cursor:pointer}.events{list-style:none;padding:0;font-size:.9rem}"
        ".events time{color:var(--soft)}"
        ".health.dead,.health.stuck{color:#c22b50;font-weight:600}.health.slow,.health.silent{color:#b06a00}"
        "@media (prefers-color-scheme:dark){.health.dead,.health.stuck{color:#ff7f9f}"
        ".health.slow,.health.silent{color:#d8b93a}}"
        "iframe{width:100%;height:92vh;border:1px solid var(--line);border-radius:.5rem}"
        "@media print{iframe{display:none}}"
        "@media print{details{display:block}pre{max-height:none}}"
        f"{svg.style()}{timeline.style()}#report .ph-paper{{fill:none}}"
    )
