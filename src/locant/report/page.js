"use strict";
// Draws the figures of the page. Their numbers are JSON in the element #figures; null is a gap.
(() => {
  const SPACE = "http://www.w3.org/2000/svg";
  const FIGURES = JSON.parse(document.getElementById("figures").textContent);
  const VIRIDIS = ["440154", "482475", "414487", "355f8d", "2a788e", "21918c", "22a884", "44bf70", "7ad151", "bddf26", "fde725"];
  const BLUE_RED = ["053061", "2166ac", "4393c3", "92c5de", "d1e5f0", "f7f7f5", "fddbc7", "f4a582", "d6604d", "b2182b", "67001f"];
  const BLUE_RED_DARK = ["b4c6ff", "84b4ea", "5493bd", "356b8c", "26465a", "20252a", "4f2a1e", "7d4030", "ab6150", "d68a7b", "ffb9ae"];
  const DASHES = [["", "6 4"], ["1 4.2", "7 4 1 4"]]; // [model][dashed]

  const dark = matchMedia("(prefers-color-scheme: dark)");
  const narrow = matchMedia("(max-width: 600px)");
  const tip = document.getElementById("tip");
  const large = document.getElementById("large");
  const plots = new Map(); // stage → plot
  let printing = false;

  // ---- elements, numbers, colours

  function html(name, attributes, ...children) {
    return fill(document.createElement(name), attributes, children);
  }

  function svg(name, attributes, ...children) {
    return fill(document.createElementNS(SPACE, name), attributes, children);
  }

  function fill(element, attributes, children) {
    for (const [key, value] of Object.entries(attributes || {})) if (value !== null) element.setAttribute(key, value);
    element.append(...children);
    return element;
  }

  const signed = (text) => text.replace(/-(?=[\d.])/g, "−"); // replaces the sign of a number, not the hyphen of a word

  function show(value) {
    if (value === null || value === undefined) return "no value";
    if (Number.isInteger(value)) return signed(String(value));
    const short = Number(value.toPrecision(6));
    return signed(Math.abs(short) < 1e-3 ? short.toExponential() : String(short));
  }

  const blank = (value) => value === null || value === undefined;

  function mix(stops, share) {
    const at = Math.min(Math.max(share, 0), 1) * (stops.length - 1);
    const low = Math.min(Math.floor(at), stops.length - 2);
    const part = (stop, place) => parseInt(stop.slice(2 * place, 2 * place + 2), 16);
    return [0, 1, 2].map((i) => Math.round(part(stops[low], i) + (at - low) * (part(stops[low + 1], i) - part(stops[low], i))));
  }

  const isDark = () => dark.matches && !printing;
  const heatStops = (diverging) => (diverging ? (isDark() ? BLUE_RED_DARK : BLUE_RED) : VIRIDIS);

  // Colour and dash of each series: colour by name and dash by model, or colour by model if there is only one name.
  function styles(series) {
    const unique = (values) => [...new Set(values)];
    const groups = unique(series.map((s) => s.group).filter(Boolean));
    const grouped = series.filter((s) => s.group);
    const byGroup = groups.length > 1 && unique(grouped.map((s) => s.name)).length === 1;
    const key = (s) => (byGroup && s.group ? "\u0000" + s.group : s.name);
    // The two models come first, so they have the same two colours in every figure.
    const keys = unique([...(byGroup ? grouped : []), ...series].map(key));
    return series.map((s) => {
      const at = keys.indexOf(key(s));
      const share = at / (keys.length - 1);
      const ramp = () => "rgb(" + mix(VIRIDIS, isDark() ? 0.35 + 0.65 * share : 0.88 * share).join(" ") + ")";
      const second = !byGroup && groups.indexOf(s.group) === 1 ? 1 : 0;
      if (!blank(s.colour)) return { colour: `var(--c${s.colour % 8})`, dash: DASHES.flat()[(Math.floor(s.colour / 8) + (s.dashed ? 1 : 0)) % 4] };
      return { colour: keys.length > 8 ? ramp() : `var(--c${at})`, dash: DASHES[second][s.dashed ? 1 : 0] };
    });
  }

  const fullName = (s) => (s.group ? `${s.name} · ${s.group}` : s.name);

  // ---- scales and ticks

  function extent(values, log) {
    let low = Infinity, high = -Infinity;
    for (const value of values) {
      if (blank(value) || (log && value <= 0)) continue;
      if (value < low) low = value;
      if (value > high) high = value;
    }
    return low <= high ? [low, high] : null;
  }

  const union = (a, b) => (a && b ? [Math.min(a[0], b[0]), Math.max(a[1], b[1])] : a || b);

  function widened(range, log, pad) {
    if (!range) return log ? [1, 10] : [0, 1];
    let [low, high] = log ? range.map(Math.log) : range;
    if (low === high) { const by = log ? 0.7 : Math.abs(low) * 0.1 || 0.5; low -= by; high += by; }
    else { low -= pad * (high - low); high += pad * (high - low); if (low === high) high = low + 1; }
    return log ? [Math.exp(low), Math.exp(high)] : [low, high];
  }

  function scale([low, high], [start, end], log) {
    const f = log ? Math.log : (v) => v;
    const by = (end - start) / (f(high) - f(low));
    return (value) => (blank(value) || (log && value <= 0) ? null : start + (f(value) - f(low)) * by);
  }

  function ticks([low, high], log, count, values) {
    return log ? logTicks(low, high, count, values) : linearTicks(low, high, count, values);
  }

  // Returns as many ticks as fit when a label needs `needed(text)` pixels.
  function fitting(domain, log, length, needed, values) {
    const most = Math.max(2, Math.floor(length / 12));
    let few = [];
    for (let count = most; count > 0; count--) {
      const list = ticks(domain, log, count, values);
      const place = scale(domain, [0, length], log);
      const fits = list.every((tick, i) => !i || place(tick.value) - place(list[i - 1].value) >= (needed(tick.text) + needed(list[i - 1].text)) / 2);
      if (fits) return list;
      few = list;
    }
    return few;
  }

  function linearTicks(low, high, count, values) {
    const raw = (high - low) / Math.max(count, 1);
    const ten = 10 ** Math.floor(Math.log10(raw));
    let step = ten * [1, 2, 5, 10].find((m) => m * ten >= raw * 0.9999);
    if (values && values.every((v) => blank(v) || Number.isInteger(v))) step = Math.max(step, 1);
    const at = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9 && at.length < 50; i++) at.push(i * step);
    const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    const big = Math.max(Math.abs(low), Math.abs(high));
    const text = (v) => (v !== 0 && (big >= 1e6 || big < 1e-3) ? Number(v.toPrecision(3)).toExponential().replace("e+", "e") : v.toFixed(digits));
    return at.map((value) => ({ value: value === 0 ? 0 : value, text: signed(text(value)) }));
  }

  function logTicks(low, high, count, values) {
    const within = (list) => list.filter((v) => v >= low * 0.9999 && v <= high * 1.0001);
    const powers = (base) => {
      const list = [];
      for (let e = Math.floor(Math.log(low) / Math.log(base)); e <= Math.ceil(Math.log(high) / Math.log(base)); e++) list.push(base ** e);
      return list;
    };
    const two = values && values.length > 1 && values.every((v) => blank(v) || (v > 0 && Number.isInteger(Math.log2(v))));
    let at = within(powers(two ? 2 : 10));
    if (!two && at.length < 3) at = within(powers(10).flatMap((p) => [p, 2 * p, 5 * p]));
    if (at.length < 2) return linearTicks(low, high, count, values).filter((tick) => tick.value > 0);
    const every = Math.max(1, Math.ceil(at.length / Math.max(count, 2)));
    const text = (v) => (v >= 1e-3 && v < 1e6 ? String(Number(v.toPrecision(3 + 4 * (v >= 1000)))) : Number(v.toPrecision(2)).toExponential().replace("e+", "e"));
    return at.filter((_, i) => i % every === 0).map((value) => ({ value, text: signed(text(value)) }));
  }

  const widthOf = (text, size) => text.length * size * 0.57;

  // ---- scales that panels share

  // Panels share one scale, or each has its own; the reader can change it.
  class Scales {
    constructor(figures, own = false) { this.figures = figures; this.own = own; this.hidden = new Set(); this.known = new Map(); }

    // Caches the result of `work` until a line is hidden or shown, or the scales change.
    once(figure, work) {
      const key = this.own ? figure : [figure.kind, figure.log_x, figure.log_y, figure.diverging].join();
      if (!this.known.has(key)) this.known.set(key, work());
      return this.known.get(key);
    }

    // The legend hides single lines, all lines of a name, or all lines of a model.
    hides(s) { return ["line " + fullName(s), "name " + s.name, "model " + s.group].some((what) => this.hidden.has(what)); }

    toggle(name) { if (!this.hidden.delete(name)) this.hidden.add(name); this.known.clear(); }

    change() { this.own = !this.own; this.known.clear(); }

    like(figure) {
      if (this.own) return [figure];
      return this.figures.filter((f) => f.kind === figure.kind && f.log_x === figure.log_x && f.log_y === figure.log_y && f.diverging === figure.diverging);
    }

    lines(figure) { return this.once(figure, () => this.lineRanges(figure)); }

    heat(figure) { return this.once(figure, () => this.colourRange(figure)); }

    lineRanges(figure) {
      let x = null, y = null;
      for (const f of this.like(figure)) for (const s of f.series) {
        x = union(x, extent(s.x, f.log_x));
        if (this.hides(s)) continue;
        for (const values of [s.y, s.low, s.high]) if (values) y = union(y, extent(values, f.log_y));
      }
      return { x: widened(x, figure.log_x, 0.015), y: widened(y, figure.log_y, 0.06) };
    }

    // The colours span the lowest to the highest value, but a few outliers share the last colour: the first query of
    // a causal model can only attend to itself, and its weight of 1 would make all other cells dark.
    colourRange(figure) {
      const values = this.like(figure).flatMap((f) => f.values.flat()).filter((v) => !blank(v));
      if (!values.length) return { low: 0, high: 1, beyond: false };
      const sizes = figure.diverging ? values.map(Math.abs) : values;
      const every = Math.ceil(sizes.length / 20000);
      const sorted = Float64Array.from(sizes.filter((_, i) => i % every === 0)).sort();
      const [low, most] = extent(sizes, false);
      const usual = sorted[Math.floor(0.99 * (sorted.length - 1))];
      const beyond = sorted.length >= 100 && usual > low && most - low > 2 * (usual - low);
      const high = (beyond ? usual : most) || (figure.diverging ? 1 : 0);
      return { low: figure.diverging ? -high : low, high, beyond };
    }
  }

  // ---- one plot: a figure on its stage

  class Plot {
    constructor(stage, figure, scales, small) {
      Object.assign(this, { stage, figure, scales, small, drawn: false, at: null });
      // Small multiples on one scale have tick labels on the left and bottom edges only.
      this.edges = { left: true, bottom: true };
      stage.setAttribute("tabindex", "0");
      stage.setAttribute("role", "img");
      stage.setAttribute("aria-label", this.describe());
      stage.addEventListener("pointermove", (event) => this.point(event));
      stage.addEventListener("pointerdown", (event) => this.point(event));
      stage.addEventListener("pointerleave", () => this.clear());
      stage.addEventListener("blur", () => this.clear());
      stage.addEventListener("focus", () => stage.matches(":focus-visible") && this.step(0, 0));
      stage.addEventListener("keydown", (event) => this.key(event));
      plots.set(stage, this);
    }

    describe() {
      const hint = "Arrow keys show the values.";
      const f = this.figure;
      const axes = `${f.y_label} by ${f.x_label}`;
      const what = f.kind === "Lines" ? `${f.series.length} lines: ${f.series.slice(0, 12).map(fullName).join(", ")}` : `heat map of ${f.rows.length} rows and ${f.columns.length} columns`;
      return `${f.title}. ${axes}; ${what}. ${hint}`;
    }

    draw() {
      const width = this.stage.clientWidth;
      if (!width) return;
      this.drawn = true;
      this.width = width;
      this.height = this.stage.clientHeight || parseFloat(this.stage.style.height);
      const root = svg("svg", { width, height: this.height, viewBox: `0 0 ${width} ${this.height}`, "aria-hidden": "true" });
      this.root = root;
      if (this.figure.kind === "Lines") this.drawLines(root);
      else this.drawHeat(root);
      this.over = root.appendChild(svg("g"));
      this.stage.replaceChildren(root);
    }

    frame(left, top, right, bottom) {
      this.area = { left, top, right: Math.max(this.width - right, left + 10), bottom: Math.max(this.height - bottom, top + 10) };
      return this.area;
    }

    drawLines(root) {
      const { figure, small } = this;
      const domain = this.scales.lines(figure);
      const all = figure.series.flatMap((s) => s.x);
      const high = this.height - (small ? 0 : 32);
      const yTicks = fitting(domain.y, figure.log_y, high, () => (small ? 17 : 40));
      const room = small ? 0 : Math.max(...yTicks.map((t) => widthOf(t.text, 11)), 8) + 10;
      const area = small ? this.frame(0.5, 0.5, 0.5, 0.5) : this.frame(room, 8, 14, 22);
      const size = small ? 10 : 11;
      const xTicks = fitting(domain.x, figure.log_x, area.right - area.left, (text) => widthOf(text, size) + (small ? 8 : 34), all);
      const x = scale(domain.x, [area.left, area.right], figure.log_x);
      const y = scale(domain.y, [area.bottom, area.top], figure.log_y);
      this.x = x;
      this.y = y;
      const axes = root.appendChild(svg("g"));
      for (const tick of yTicks) {
        const at = y(tick.value);
        axes.append(svg("line", { x1: area.left, x2: area.right, y1: at, y2: at, class: tick.value === 0 && !figure.log_y ? "zero" : "grid" }));
        if (!small || this.edges.left) axes.append(svg("text", { x: area.left - (small ? 5 : 8), y: at + size * 0.34, "text-anchor": "end" }, tick.text));
      }
      if (small) axes.append(svg("line", { x1: area.left, x2: area.right, y1: area.bottom, y2: area.bottom, class: "zero" }));
      let written = -Infinity;
      for (const tick of xTicks) {
        const at = x(tick.value);
        const half = widthOf(tick.text, size) / 2;
        if (tick.value === 0 && !figure.log_x && domain.x[0] < 0 && domain.x[1] > 0) axes.append(svg("line", { x1: at, x2: at, y1: area.top, y2: area.bottom, class: "zero" }));
        if (small && !this.edges.bottom) continue;
        if (!small) axes.append(svg("line", { x1: at, x2: at, y1: area.bottom, y2: area.bottom + 4, class: "zero" }));
        const middle = Math.min(Math.max(at, area.left + (small ? half : 0)), area.right + 12 - half);
        if (middle - half < written + 6) continue;
        written = middle + half;
        axes.append(svg("text", { x: middle, y: area.bottom + (small ? 12 : 17), "text-anchor": "middle" }, tick.text));
      }
      for (const [value, text] of figure.marks) {
        const at = x(value);
        if (at === null || at < area.left || at > area.right) continue;
        axes.append(svg("line", { x1: at, x2: at, y1: area.top, y2: area.bottom, class: "mark" }));
        const before = at + 6 + widthOf(text, size) > area.right;
        if (!small) axes.append(svg("text", { x: at + (before ? -5 : 5), y: area.top + 9, "text-anchor": before ? "end" : "start", class: "mark" }, text));
      }
      const style = styles(figure.series);
      this.groups = figure.series.map((series, index) => {
        const group = svg("g", { class: "series", "data-series": fullName(series) });
        if (!this.scales.hides(series)) this.drawSeries(group, series, style[index]);
        root.append(group);
        return group;
      });
      this.style = style;
    }

    drawSeries(group, series, { colour, dash }) {
      const runs = [], bands = [];
      let run = null, band = null;
      for (let i = 0; i < series.x.length; i++) {
        const px = this.x(series.x[i]), py = this.y(series.y[i]);
        if (px === null || py === null) run = null;
        else if (run) run.push([px, py]);
        else runs.push((run = [[px, py]]));
        const low = series.low && this.y(series.low[i]), high = series.high && this.y(series.high[i]);
        if (px === null || blank(low) || blank(high)) band = null;
        else if (band) band.push([px, low, high]);
        else bands.push((band = [[px, low, high]]));
      }
      const n = (v) => v.toFixed(2);
      // Whiskers of different series are moved apart, so that none covers another.
      const aside = Math.min(5, 30 / this.figure.series.length) * (this.figure.series.indexOf(series) - (this.figure.series.length - 1) / 2);
      if (this.figure.whiskers) for (const [px, low, high] of bands.splice(0).flat()) {
        const at = Math.min(Math.max(px + aside, this.area.left + 3), this.area.right - 3);
        group.append(svg("path", { class: "line whisker", d: `M${n(at - 2.5)} ${n(low)}h5M${n(at)} ${n(low)}V${n(high)}m-2.5 0h5`, style: `stroke:${colour}` }));
      }
      for (const b of bands) {
        if (b.length === 1) { group.append(svg("line", { x1: b[0][0], x2: b[0][0], y1: b[0][1], y2: b[0][2], style: `stroke:${colour};opacity:.4` })); continue; }
        const edge = [...b.map(([px, , py]) => `${n(px)} ${n(py)}`), ...b.map(([px, py]) => `${n(px)} ${n(py)}`).reverse()];
        group.append(svg("path", { class: "band", d: "M" + edge.join("L") + "Z", style: `fill:${colour}` }));
      }
      const path = runs.filter((r) => r.length > 1).map((r) => "M" + r.map(([px, py]) => `${n(px)} ${n(py)}`).join("L")).join("");
      if (path) group.append(svg("path", { class: series.thin ? "line thin" : "line", d: path, style: `stroke:${colour}`, "stroke-dasharray": dash || null }));
      const few = series.x.length <= 12 && !this.small && !series.dashed;
      for (const r of runs) if (few || r.length === 1) for (const [px, py] of r) group.append(svg("circle", { cx: n(px), cy: n(py), r: this.small ? 1.6 : 2.6, style: `fill:${colour}` }));
    }

    drawHeat(root) {
      const { figure, small } = this;
      const rows = figure.rows.length, columns = figure.columns.length;
      const longest = Math.max(0, ...figure.rows.map((r) => widthOf(r, 11)));
      const area = small ? this.frame(0.5, 0.5, 0.5, 0.5) : this.frame(Math.min(longest + 10, this.width * 0.36), 2, 8, 20);
      if (!rows || !columns) return;
      const wide = area.right - area.left, tall = area.bottom - area.top;
      const cell = (this.cell = { width: wide / columns, height: tall / rows });
      const gaps = figure.values.some((row) => row.some(blank));
      if (gaps) root.append(hatch(area));
      root.append(svg("image", { x: area.left, y: area.top, width: wide, height: tall, preserveAspectRatio: "none", href: picture(figure, this.scales.heat(figure), wide, tall) }));
      root.append(svg("rect", { class: "frame", x: area.left, y: area.top, width: wide, height: tall }));
      const size = small ? 10 : 11;
      if (!small || this.edges.left) {
        for (const i of thinned(figure.rows, cell.height, size + (small ? 4 : 7))) {
          const shown = shortened(figure.rows[i], small ? 34 : area.left - 8, size);
          root.append(svg("text", { x: area.left - (small ? 4 : 7), y: area.top + (i + 0.5) * cell.height + size * 0.35, "text-anchor": "end" }, shown));
        }
      }
      if (!small || this.edges.bottom) {
        const widest = Math.max(0, ...figure.columns.map((c) => widthOf(c, size)));
        for (const i of thinned(figure.columns, cell.width, Math.min(widest, 90) + (small ? 12 : 20))) {
          root.append(svg("text", { x: area.left + (i + 0.5) * cell.width, y: area.bottom + (small ? 11 : 15), "text-anchor": "middle" }, shortened(figure.columns[i], 90, size)));
        }
      }
    }

    // ---- reading values

    point(event) {
      if (!this.drawn) return;
      const box = this.stage.getBoundingClientRect();
      const px = event.clientX - box.left, py = event.clientY - box.top;
      const hit = this.figure.kind === "Lines" ? this.nearest(px, py) : this.under(px, py);
      if (hit) this.show(hit, event.clientX, event.clientY);
      else this.clear();
    }

    visible(i) { return !this.scales.hides(this.figure.series[i]); }

    nearest(px, py) {
      let best = null;
      this.figure.series.forEach((series, s) => {
        if (!this.visible(s)) return;
        for (let i = 0; i < series.x.length; i++) {
          const x = this.x(series.x[i]), y = this.y(series.y[i]);
          if (x === null || y === null) continue;
          const far = 4 * Math.abs(x - px) + Math.abs(y - py); // the x under the pointer counts most, then the line
          if (!best || far < best.far) best = { s, i, far };
        }
      });
      return best;
    }

    under(px, py) {
      const { area, cell } = this;
      const column = Math.floor((px - area.left) / cell.width), row = Math.floor((py - area.top) / cell.height);
      const inside = row >= 0 && column >= 0 && row < this.figure.rows.length && column < this.figure.columns.length;
      return inside ? { row, column } : null;
    }

    show(hit, clientX, clientY) {
      this.at = hit;
      if (this.figure.kind === "Lines") this.showPoint(hit);
      else this.showCell(hit);
      placeTip(clientX, clientY);
    }

    showPoint({ s, i }) {
      const { figure, area } = this;
      const series = figure.series[s];
      const x = this.x(series.x[i]), y = this.y(series.y[i]);
      this.groups.forEach((group, index) => group.classList.toggle("on", index === s));
      this.root.classList.add("lit");
      this.over.replaceChildren(
        svg("line", { class: "hair", x1: x, x2: x, y1: area.top, y2: area.bottom }),
        svg("line", { class: "hair", x1: area.left, x2: area.right, y1: y, y2: y }),
        svg("circle", { class: "spot", cx: x, cy: y, r: 4, style: `fill:${this.style[s].colour}` }),
      );
      const lines = figure.series.map((other, index) => [other, index]).filter(([, index]) => this.visible(index));
      const listed = lines.length <= 8 ? lines : lines.filter(([, index]) => index === s);
      const rows = listed.map(([other, index]) => {
        const at = index === s ? i : other.x.indexOf(series.x[i]);
        if (at < 0) return null;
        const interval = other.low && !blank(other.low[at]) ? ` (${show(other.low[at])} … ${show(other.high[at])})` : "";
        const dot = html("i", { style: `background:${this.style[index].colour}` });
        return html("div", { class: index === s ? "on" : null }, html("span", {}, dot, fullName(other)), html("span", {}, show(other.y[at]) + interval));
      });
      const head = html("div", {}, html("span", {}, figure.x_label), html("span", {}, show(series.x[i])));
      tip.replaceChildren(...this.heading(), head, ...rows.filter(Boolean), ...(series.name === figure.y_label ? [] : [html("small", {}, figure.y_label)]));
    }

    showCell({ row, column }) {
      const { figure, area, cell } = this;
      const at = { x: area.left + column * cell.width, y: area.top + row * cell.height, width: cell.width, height: cell.height };
      this.over.replaceChildren(svg("rect", { class: "cell", ...at }), svg("rect", { class: "cell inner", ...at }));
      const line = (name, value, on) => html("div", { class: on ? "on" : null }, html("span", {}, name), html("span", {}, value));
      tip.replaceChildren(
        ...this.heading(),
        line(figure.y_label, signed(figure.rows[row])),
        line(figure.x_label, signed(figure.columns[column])),
        line("value", show(figure.values[row][column]), true),
      );
    }

    heading() { return this.small ? [html("b", {}, this.figure.title)] : []; }

    clear() {
      if (!this.at) return;
      this.at = null;
      tip.hidden = true;
      this.over.replaceChildren();
      this.root.classList.remove("lit");
    }

    // Highlights the lines for which `chosen` returns true; null ends the highlight.
    light(chosen) {
      if (!this.drawn || this.figure.kind !== "Lines") return;
      this.groups.forEach((group, i) => group.classList.toggle("on", chosen !== null && chosen(this.figure.series[i])));
      this.root.classList.toggle("lit", chosen !== null);
    }

    key(event) {
      const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
      if (event.key === "Escape" && this.at) { this.clear(); event.preventDefault(); }
      else if (moves[event.key]) { this.step(...moves[event.key]); event.preventDefault(); }
    }

    // Moves one x or column sideways, one series or row up or down.
    step(sideways, down) {
      if (!this.drawn) this.draw();
      if (!this.drawn) return;
      const f = this.figure, limit = (v, n) => Math.min(Math.max(v, 0), n - 1);
      const box = this.stage.getBoundingClientRect();
      if (f.kind === "Heat") {
        if (!f.rows.length || !f.columns.length) return;
        const from = this.at || { row: 0, column: 0 };
        const hit = { row: limit(from.row + down, f.rows.length), column: limit(from.column + sideways, f.columns.length) };
        this.show(hit, box.left + this.area.left + (hit.column + 0.5) * this.cell.width, box.top + this.area.top + (hit.row + 0.5) * this.cell.height);
        return;
      }
      const points = (s) => f.series[s].x.map((_, i) => i).filter((i) => this.x(f.series[s].x[i]) !== null && this.y(f.series[s].y[i]) !== null);
      const shown = f.series.map((_, s) => s).filter((s) => this.visible(s) && points(s).length);
      if (!shown.length) return;
      const s = shown[limit((this.at ? Math.max(shown.indexOf(this.at.s), 0) : 0) + down, shown.length)];
      const list = points(s);
      const near = this.at ? list.findIndex((i) => i >= this.at.i) : 0;
      const i = list[limit((near < 0 ? list.length - 1 : near) + sideways, list.length)];
      this.show({ s, i }, box.left + this.x(f.series[s].x[i]), box.top + this.y(f.series[s].y[i]));
    }
  }

  function placeTip(clientX, clientY) {
    const home = large.open ? large : document.body; // a modal dialog covers everything outside it
    if (tip.parentNode !== home) home.append(tip);
    tip.hidden = false;
    const { width, height } = tip.getBoundingClientRect();
    const left = clientX + 16 + width > innerWidth - 6 ? clientX - 16 - width : clientX + 16;
    const top = clientY + 16 + height > innerHeight - 6 ? clientY - 16 - height : clientY + 16;
    tip.style.transform = `translate(${Math.round(Math.max(left, 6))}px, ${Math.round(Math.max(top, 6))}px)`;
  }

  // ---- heat maps

  // Returns the matrix as one image with whole pixels per cell, so it stays sharp when printed.
  function picture(figure, { low, high }, wide, tall) {
    const rows = figure.rows.length, columns = figure.columns.length;
    const times = (size, count) => Math.max(1, Math.min(16, Math.ceil((1.5 * size) / count)));
    const across = times(wide, columns), down = times(tall, rows);
    const canvas = html("canvas", { width: columns * across, height: rows * down });
    const context = canvas.getContext("2d");
    const stops = heatStops(figure.diverging);
    const table = Array.from({ length: 256 }, (_, i) => `rgb(${mix(stops, i / 255).join(",")})`);
    for (let r = 0; r < rows; r++) for (let c = 0; c < columns; c++) {
      const value = figure.values[r][c];
      if (blank(value)) continue;
      const share = high > low ? (value - low) / (high - low) : 0.5;
      context.fillStyle = table[Math.round(255 * Math.min(Math.max(share, 0), 1))];
      context.fillRect(c * across, r * down, across, down);
    }
    return canvas.toDataURL();
  }

  function hatch(area) {
    const lines = [];
    const tall = area.bottom - area.top, wide = area.right - area.left;
    for (let d = 5; d < wide + tall; d += 5) {
      const x1 = Math.min(d, wide), x2 = Math.max(0, d - tall);
      lines.push(`M${area.left + x1} ${area.top + d - x1}L${area.left + x2} ${area.top + d - x2}`);
    }
    return svg("path", { class: "hatched", d: lines.join("") });
  }

  // Returns the indices of labels that fit without touching; if there is a label 0, it is one of them.
  function thinned(labels, size, needed) {
    const every = [1, 2, 4, 5, 8, 10, 16, 20, 25, 32, 50, 64, 100, 128, 256, 512, 1024].find((k) => k * size >= needed) || labels.length;
    const from = Math.max(labels.indexOf("0"), 0) % every;
    return labels.map((_, i) => i).filter((i) => i % every === from);
  }

  function shortened(text, room, size) {
    const most = Math.max(2, Math.floor(room / (size * 0.57)));
    return signed(text.length > most ? text.slice(0, most - 1) + "…" : text);
  }

  function colourKey(figures, scales) {
    const heats = figures.filter((f) => f.kind === "Heat");
    const key = html("div", { class: "key" });
    if (!heats.length) return { key, draw: () => {} };
    const draw = () => {
      const { low, high, beyond } = scales.heat(heats[0]);
      const colours = Array.from({ length: 21 }, (_, i) => `rgb(${mix(heatStops(heats[0].diverging), i / 20).join(" ")})`);
      const bar = html("i", { style: `background:linear-gradient(90deg, ${colours.join(",")})` });
      const short = (v) => show(Number(v.toPrecision(3)));
      const own = scales.own && scales.figures.length > 1;
      const ends = [(beyond && heats[0].diverging ? "≤ " : "") + short(low), (beyond ? "≥ " : "") + short(high)];
      key.replaceChildren(html("span", {}, own ? "lowest" : ends[0]), bar, html("span", {}, own ? "highest of each panel" : ends[1]));
      if (heats.some((f) => f.values.some((row) => row.some(blank)))) key.append(html("span", { class: "gap" }), html("span", {}, "no value"));
    };
    draw();
    return { key, draw };
  }

  // ---- placing figures on the page

  const redraws = new Set(); // called when the colours change
  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting) {
      watcher.unobserve(entry.target);
      const plot = plots.get(entry.target);
      if (!plot.drawn) plot.draw();
    }
  }, { rootMargin: "400px 0px" });

  const sizes = new ResizeObserver((entries) => {
    for (const entry of entries) entry.target.resized?.();
  });

  function again(list) { for (const plot of list) if (plot.drawn) plot.draw(); }

  function heightOf(figure, width) {
    if (figure.kind === "Lines") return narrow.matches ? 240 : 320;
    const rows = figure.rows.length;
    const left = Math.min(Math.max(0, ...figure.rows.map((r) => widthOf(r, 11))) + 10, width * 0.36);
    if (isSquare(figure)) return Math.min(width, 560 + left) - left - 8 + 22;
    return Math.min(Math.max(rows * (rows > 40 ? 6 : 20), Math.min(90, 30 * rows)), 560, Math.max(width * 1.4, 200)) + 22;
  }

  const isSquare = (f) => f.kind === "Heat" && f.rows.length === f.columns.length && f.rows.length > 8;

  function putSingle(box, figure, scales) {
    const stage = html("div", { class: "stage" });
    const plot = new Plot(stage, figure, scales, false);
    const key = colourKey([figure], scales);
    const redraw = () => { key.draw(); again([plot]); };
    if (figure.kind === "Lines") box.append(...legend(figure.series, scales, () => [plot], redraw));
    const above = html("div", { class: "axis y" }, figure.y_label);
    const below = html("div", { class: "axis x" }, figure.x_label);
    box.append(above, stage, below);
    if (figure.kind === "Heat") box.append(key.key);
    let before = 0;
    const layout = () => {
      const width = box.clientWidth;
      if (!width || width === before) return;
      before = width;
      stage.style.height = heightOf(figure, width) + "px";
      if (isSquare(figure)) for (const part of [stage, below]) part.style.maxWidth = 568 + Math.min(Math.max(0, ...figure.rows.map((r) => widthOf(r, 11))) + 10, width * 0.36) + "px";
      redraw();
    };
    box.resized = layout;
    layout();
    sizes.observe(box);
    watcher.observe(stage);
    redraws.add(redraw);
    return { redraw, plots: [plot] };
  }

  function putSmall(box, figure, scales) {
    const list = [];
    const key = colourKey(figure.panels, scales);
    const grid = html("div", { class: "panels" });
    const redraw = () => { arrange(box, grid, list, figure, scales); key.draw(); again(list); };
    const named = new Map();
    for (const panel of figure.panels) for (const s of panel.series || []) if (!named.has(fullName(s))) named.set(fullName(s), s);
    if (named.size > 1) box.append(...legend([...named.values()], scales, () => list, redraw));
    const first = figure.panels[0];
    const same = first && figure.panels.every((p) => p.x_label === first.x_label && p.y_label === first.y_label);
    if (same) box.append(html("div", { class: "axis y" }, first.y_label));
    for (const panel of figure.panels) {
      const stage = html("div", { class: "stage" });
      const plot = new Plot(stage, panel, scales, true);
      const holder = html("div", { class: "panel" }, html("h5", { title: panel.title }, panel.title), stage);
      holder.addEventListener("click", () => enlarge(panel));
      holder.addEventListener("keydown", (event) => event.key === "Enter" && enlarge(panel));
      grid.append(holder);
      list.push(plot);
    }
    box.append(grid);
    if (same) box.append(html("div", { class: "axis x" }, first.x_label));
    if (figure.panels.some((p) => p.kind === "Heat")) box.append(key.key);
    let before = 0;
    box.resized = () => { if (box.clientWidth !== before) { before = box.clientWidth; redraw(); } };
    box.resized();
    sizes.observe(box);
    for (const plot of list) watcher.observe(plot.stage);
    redraws.add(redraw);
    return { redraw, plots: list };
  }

  // Sets the number and size of the columns of small panels.
  function arrange(box, grid, list, figure, scales) {
    const total = box.clientWidth;
    if (!total) return;
    const left = gutter(figure, scales), own = scales.own;
    const between = own ? left + 8 : 12;
    const fits = (n) => (total - left - (n - 1) * between) / n;
    let columns = Math.min(figure.columns, Math.max(figure.panels.length, 1));
    // A narrow page has fewer columns, but a number that divides the rows evenly.
    const divisors = Array.from({ length: columns }, (_, i) => columns - i).filter((n) => figure.columns % n === 0 || columns < figure.columns);
    columns = divisors.find((n) => fits(n) >= (own ? 56 : 66)) || 1;
    const width = Math.min(fits(columns), 420);
    grid.style.cssText = `grid-template-columns:repeat(${columns}, ${width}px);gap:${own ? 26 : 12}px ${between}px;padding:0 0 18px ${left}px`;
    list.forEach((plot, i) => {
      const share = isSquare(plot.figure) ? 1 : plot.figure.kind === "Heat" ? 0.75 : columns === 1 ? 0.5 : 0.66;
      plot.stage.style.height = Math.round(width * share) + "px";
      plot.edges = { left: own || i % columns === 0, bottom: own || i + columns >= list.length };
    });
  }

  // Returns the room that the y labels of small panels need.
  function gutter(figure, scales) {
    let widest = 16;
    for (const panel of figure.panels) {
      const labels = panel.kind === "Heat" ? panel.rows : fitting(scales.lines(panel).y, panel.log_y, 60, () => 17).map((t) => t.text);
      for (const text of labels) widest = Math.max(widest, Math.min(widthOf(text, 10), 34));
      if (!scales.own) break;
    }
    return widest + 7;
  }

  // The entries of a legend: lines; or models, then names, if two models have several lines each.
  function legendEntries(series) {
    const style = styles(series);
    const models = [...new Set(series.map((s) => s.group).filter(Boolean))];
    const several = new Set(series.filter((s) => s.group).map((s) => s.name)).size > 1;
    if (models.length < 2 || !several) return series.map((s, i) => ({ text: fullName(s), what: "line " + fullName(s), of: (o) => fullName(o) === fullName(s), ...style[i] }));
    const first = new Map();
    series.forEach((s, i) => first.has(s.name) || first.set(s.name, { text: s.name, what: "name " + s.name, of: (o) => o.name === s.name, colour: style[i].colour, dash: DASHES[0][s.dashed ? 1 : 0] }));
    const ofModels = models.map((m, i) => ({ text: m, what: "model " + m, of: (o) => o.group === m, colour: "var(--soft)", dash: DASHES[i % 2][0] }));
    return [...ofModels, ...first.values()];
  }

  function legend(series, scales, theirs, redraw) {
    if (series.length < 2) return [];
    const list = html("ul", { class: "legend", "aria-label": "Lines; press to hide or show" });
    const paint = () => {
      list.replaceChildren(...legendEntries(series).map(({ text, what, of, colour, dash }) => {
        const line = svg("line", { x1: 1, x2: 19, y1: 4, y2: 4, style: `stroke:${colour}`, "stroke-width": 2.4, "stroke-linecap": "round", "stroke-dasharray": dash || null });
        const swatch = svg("svg", { width: 20, height: 8, "aria-hidden": "true" }, line);
        const button = html("button", { type: "button", "aria-pressed": String(!scales.hidden.has(what)) }, swatch, html("span", {}, text));
        const light = (on) => { for (const plot of theirs()) plot.light(on ? of : null); };
        button.addEventListener("click", () => {
          scales.toggle(what);
          button.setAttribute("aria-pressed", String(!scales.hidden.has(what)));
          redraw();
        });
        button.addEventListener("pointerenter", () => light(!scales.hidden.has(what)));
        button.addEventListener("pointerleave", () => light(false));
        return html("li", {}, button);
      }));
    };
    paint();
    redraws.add(paint);
    return [list];
  }

  function enlarge(panel) {
    tip.hidden = true;
    const box = html("div", { class: "plot" });
    const close = html("button", { type: "button" }, "close");
    close.addEventListener("click", () => large.close());
    large.replaceChildren(html("div", { class: "bar" }, html("h3", {}, panel.title), html("span", { class: "tools" }, close)), box);
    large.showModal();
    const kept = new Set(redraws);
    const { plots: [plot] } = putSingle(box, panel, new Scales([panel]));
    plot.draw();
    large.addEventListener("close", () => {
      sizes.unobserve(box);
      watcher.unobserve(plot.stage);
      plots.delete(plot.stage);
      for (const task of redraws) if (!kept.has(task)) redraws.delete(task);
      tip.hidden = true;
      document.body.append(tip);
      large.replaceChildren();
    }, { once: true });
  }
  large.addEventListener("click", (event) => event.target === large && large.close());

  function put(element, at) {
    const boxes = [...element.querySelectorAll(".plot")];
    const parts = boxes.map((box) => (box.dataset.side ? FIGURES[at][box.dataset.side] : FIGURES[at]));
    const scales = new Scales(parts.flatMap((part) => part.panels || [part]), parts.some((part) => part.own));
    const placed = boxes.map((box, i) => (parts[i].kind === "Small" ? putSmall : putSingle)(box, parts[i], parts[i].kind === "Lines" ? new Scales([parts[i]]) : scales));
    const tools = element.querySelector(".tools");
    if (scales.figures.length > 1 && parts.every((part) => part.kind !== "Lines")) {
      const button = html("button", { type: "button", class: "scales" }, scales.own ? "same scale" : "own scales");
      button.title = "one scale for all panels, or one for each";
      button.addEventListener("click", () => {
        scales.change();
        button.textContent = scales.own ? "same scale" : "own scales";
        for (const { redraw } of placed) redraw();
      });
      tools.prepend(button);
    }
    element.querySelector(".csv").addEventListener("click", (event) => {
      event.preventDefault();
      download(FIGURES[at].csv, event.currentTarget.download);
    });
  }

  // Saves a csv file from the page: base64 of the text compressed with zlib.
  async function download(packed, name) {
    const bytes = Uint8Array.from(atob(packed), (letter) => letter.charCodeAt(0));
    const text = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    const file = await new Response(text, { headers: { "Content-Type": "text/csv" } }).blob();
    const address = URL.createObjectURL(file);
    html("a", { href: address, download: name }).click();
    setTimeout(() => URL.revokeObjectURL(address), 2000);
  }

  // ---- tables: a click on a column header sorts

  function sortable(table) {
    const body = table.tBodies[0];
    [...table.tHead.rows[0].cells].forEach((head, column) => {
      const button = html("button", { type: "button", title: "sort" }, head.textContent);
      head.replaceChildren(button);
      button.addEventListener("click", () => {
        const down = head.getAttribute("aria-sort") === "ascending";
        for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        const number = head.classList.contains("number");
        const value = (row) => { const text = row.cells[column].textContent; return number ? (text === "–" ? NaN : Number(text.replace(/−/g, "-"))) : text; };
        const order = (a, b) => (number ? a - b : a.localeCompare(b, undefined, { numeric: true }));
        const rows = [...body.rows].map((row) => [value(row), row]);
        const last = (v) => (Number.isNaN(v) ? 1 : 0); // gaps go to the end
        rows.sort(([a], [b]) => last(a) - last(b) || (last(a) ? 0 : down ? order(b, a) : order(a, b)));
        body.append(...rows.map(([, row]) => row));
      });
    });
  }

  // ---- start

  FIGURES.forEach((_, at) => put(document.getElementById("f" + at), at));
  document.querySelectorAll("table").forEach(sortable);

  const recolour = () => { for (const task of redraws) task(); };
  dark.addEventListener("change", recolour);

  function print(on) {
    if (printing === on) return;
    printing = on;
    if (on) for (const plot of plots.values()) if (!plot.drawn) plot.draw();
    recolour();
  }
  addEventListener("beforeprint", () => print(true));
  addEventListener("afterprint", () => print(false));

  const links = new Map([...document.querySelectorAll("nav li a")].map((a) => [document.getElementById(a.hash.slice(1)), a]));
  const inView = new Set();
  const reader = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (entry.isIntersecting) inView.add(entry.target);
      else inView.delete(entry.target);
    }
    let found = false;
    for (const [section, link] of links) {
      const here = !found && inView.has(section);
      found ||= here;
      link.classList.toggle("here", here);
      if (here) link.setAttribute("aria-current", "true");
      else link.removeAttribute("aria-current");
    }
  }, { rootMargin: "-15% 0px -60% 0px" });
  for (const section of links.keys()) reader.observe(section);
})();
