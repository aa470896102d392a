/* Charts: draws each `[data-chart]` with uPlot, keeps its legend, and writes its numbers as a table when they are asked for. */
"use strict";
(() => {
  const drawn = new Map();
  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  // A canvas does not understand var() and light-dark(), so a hidden element computes each colour as rgb.
  const probe = document.createElement("i");
  probe.hidden = true;
  function computed(colour) {
    if (!probe.isConnected) document.body.append(probe);
    probe.style.color = colour;
    return getComputedStyle(probe).color;
  }

  function shown(value, unit) {
    if (value === null || value === undefined) return "–";
    const size = Math.abs(value);
    let text;
    if (size >= 1e9) text = `${(value / 1e9).toPrecision(3)}G`;
    else if (size >= 1e6) text = `${(value / 1e6).toPrecision(3)}M`;
    else if (size >= 1e4) text = `${(value / 1e3).toPrecision(3)}k`;
    else text = size && size < 100 ? String(Number(value.toPrecision(3))) : Math.round(value).toLocaleString("en");
    return unit === "%" ? `${text} %` : text;
  }

  function clock(seconds, span) {
    const text = new Date(seconds * 1000).toISOString();
    return span > 2 * 86400 ? text.slice(5, 10) : text.slice(11, span < 900 ? 19 : 16);
  }

  /* Time as text, with seconds in a short chart. */
  function stamp(seconds, times) {
    const length = times[times.length - 1] - times[0] < 900 ? 19 : 16;
    return new Date(seconds * 1000).toISOString().slice(0, length).replace("T", " ");
  }

  /* Series from the last to the first, each with the sum of those before it, so that the areas lie on one another. */
  function stacked(series, length) {
    const sums = new Array(length).fill(0);
    return series.map(({ values }) => values.map((value, i) => (sums[i] += value || 0)));
  }

  /* Indices of the values without a neighbour. */
  function alone(values) {
    const gap = (i) => (values[i] ?? null) === null;
    return values.flatMap((_, i) => (!gap(i) && gap(i - 1) && gap(i + 1) ? [i] : []));
  }

  function describe(figure, chart) {
    // A single step has no curve: the legend shows its values.
    legend(figure, chart, chart.times.length === 1 ? 0 : null);
    numbers(figure, chart);
  }

  function draw(figure) {
    const chart = JSON.parse(figure.dataset.chart), plot = figure.querySelector(".plot");
    drawn.get(figure)?.destroy();
    drawn.delete(figure);
    describe(figure, chart);
    if (!window.uPlot) return;
    plot.replaceChildren();
    const known = chart.series.some((one) => one.values.some((value) => value !== null));
    if (chart.times.length < 2 || !known) {
      const text = document.createElement("p");
      text.className = "empty";
      text.textContent = chart.times.length === 1 ? "There is only one step so far; its values are below. The curve begins with the next step." : "No data in this period.";
      plot.append(text);
      return;
    }
    const span = chart.times[chart.times.length - 1] - chart.times[0];
    const token = (i) => `var(--series-${Math.min(i + 1, 9)})`, colour = (i) => computed(token(i));
    // Opaque, because each area reaches down to zero behind those in front of it.
    const fill = (i) => computed(`color-mix(in srgb, ${token(i)} 84%, var(--surface))`);
    const isArea = chart.stacked, isBar = chart.kind === "bar";
    const values = isArea ? stacked(chart.series, chart.times.length) : chart.series.map((one) => one.values);
    const order = chart.series.map((_, i) => i);
    if (isArea) order.reverse();
    const series = order.map((i) => ({
      stroke: colour(i),
      width: isArea ? 1 : 1.75,
      fill: isArea || isBar ? fill(i) : undefined,
      paths: isBar ? uPlot.paths.bars({ size: [0.7, 40] }) : uPlot.paths.linear(),
      // A value between gaps has no line to a neighbour, so it is a point.
      points: { show: true, size: 5, filter: () => (chart.times.length < 3 ? null : alone(chart.series[i].values)) },
      spanGaps: false,
    }));
    const axis = { stroke: computed("var(--quiet)"), font: `11.5px ${style("--font")}`, grid: { stroke: computed("var(--line)"), width: 1 }, ticks: { show: false } };
    const options = {
      width: plot.clientWidth || 300,
      height: 210,
      // Half of a label of the time axis: the last one may be centred on the right edge.
      padding: [8, span < 900 ? 30 : 20, 0, 0],
      legend: { show: false },
      cursor: { y: false, points: { show: !isArea, size: 6 }, drag: { x: true, y: false, setScale: false } },
      scales: {
        // The first and the last bar have their half beyond the first and the last time.
        x: { time: true, range: (_, low, high) => { const half = isBar && chart.times.length > 1 ? (high - low) / (chart.times.length - 1) / 2 : 0; return [low - half, high + half]; } },
        y: { range: (_, low, high) => [Math.min(0, low), high > 0 ? high * 1.06 : 1] } },
      axes: [
        { ...axis, size: 28, space: 64, values: (_, ticks) => ticks.map((tick) => clock(tick, span)) },
        { ...axis, size: 52, space: 36, values: (_, ticks) => ticks.map((tick) => shown(tick, chart.unit)) },
      ],
      series: [{}, ...series],
      hooks: {
        setCursor: [(u) => legend(figure, chart, u.cursor.idx ?? null)],
        setSelect: [(u) => zoom(u)],
      },
    };
    options.tzDate = (seconds) => uPlot.tzDate(new Date(seconds * 1000), "Etc/UTC");
    drawn.set(figure, new uPlot(options, [chart.times, ...order.map((i) => values[i])], plot));
  }

  /* A dragged range becomes the page's custom period, where the page has one. */
  function zoom(u) {
    if (u.select.width < 8 || !document.querySelector("[data-zoom]")) return;
    const at = (x) => new Date(u.posToVal(x, "x") * 1000).toISOString().slice(0, 16) + "Z";
    const url = new URL(location.href);
    url.searchParams.delete("period");
    url.searchParams.set("since", at(u.select.left));
    url.searchParams.set("until", at(u.select.left + u.select.width));
    location.assign(url);
  }

  function legend(figure, chart, index) {
    const box = figure.querySelector(".legend"), parts = [];
    if (index !== null && chart.times[index] !== undefined) {
      const time = document.createElement("span");
      time.className = "time";
      time.textContent = `${stamp(chart.times[index], chart.times)} UTC`;
      parts.push(time);
    }
    chart.series.forEach((one, i) => {
      const entry = document.createElement("span"), mark = document.createElement("i");
      mark.className = `c${Math.min(i + 1, 9)}`;
      entry.append(mark, one.name);
      if (index !== null) {
        const value = document.createElement("b");
        value.textContent = shown(one.values[index], chart.unit);
        entry.append(value);
      }
      parts.push(entry);
    });
    box.replaceChildren(...parts);
  }

  function numbers(figure, chart) {
    const details = figure.querySelector(".numbers"), box = details.querySelector(".table-box");
    const fill = () => {
      if (!details.open) return;
      const table = document.createElement("table"), head = table.createTHead().insertRow(), body = table.createTBody();
      table.className = "data";
      for (const title of ["Time (UTC)", ...chart.series.map((one) => one.name)]) {
        const cell = document.createElement("th");
        cell.scope = "col";
        cell.textContent = title;
        head.append(cell);
      }
      chart.times.forEach((time, i) => {
        const row = body.insertRow();
        const at = row.insertCell();
        at.className = "wrap";
        at.textContent = stamp(time, chart.times);
        for (const one of chart.series) {
          const cell = row.insertCell();
          cell.dataset.label = one.name;
          cell.textContent = one.values[i] ?? "–";
        }
      });
      box.replaceChildren(table);
    };
    details.ontoggle = fill;
    fill();
  }

  function drawAll() {
    for (const figure of drawn.keys()) if (!figure.isConnected) { drawn.get(figure).destroy(); drawn.delete(figure); }
    for (const figure of document.querySelectorAll("[data-chart]")) draw(figure);
  }

  /* Also again with the page's own font, if the browser still loads it: a canvas keeps the font that it was drawn with. */
  let hasBegun = false;
  function begin() {
    if (hasBegun) return;
    hasBegun = true;
    drawAll();
    const font = `11.5px ${style("--font")}`;
    if (drawn.size && !document.fonts.check(font)) document.fonts.load(font).then(drawAll, () => {});
  }

  let waiting = 0;
  addEventListener("resize", () => { clearTimeout(waiting); waiting = setTimeout(drawAll, 120); });
  document.addEventListener("DOMContentLoaded", () => {
    // The first paint has the legends, whose heights move the rest of the page, and does not wait for the curves.
    for (const figure of document.querySelectorAll("[data-chart]")) describe(figure, JSON.parse(figure.dataset.chart));
    requestAnimationFrame(() => requestAnimationFrame(begin));
    // A page in another tab has no frames.
    setTimeout(begin, 1000);
  });
  document.addEventListener("loraplex:theme", drawAll);
  document.addEventListener("loraplex:charts", drawAll);
  document.addEventListener("loraplex:chart", (event) => draw(event.detail));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
})();
