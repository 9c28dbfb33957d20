"use strict";
// Draws the charts of a page: one SVG each, at the width it has, in the colours of the style sheet. No library, no network.
// A chart is {kind, x, y, series, bands, marks, ...} in the page's JSON; `figure[data-chart=N]` is where it goes.
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const charts = JSON.parse(document.getElementById("charts").textContent);

  function draw(name, attributes, parent, text) {
    const node = document.createElementNS(SVG, name);
    for (const key in attributes) if (attributes[key] !== undefined) node.setAttribute(key, attributes[key]);
    if (text !== undefined) node.textContent = text;
    if (parent) parent.append(node);
    return node;
  }

  // ---- numbers ----
  function number(value) {
    if (value === null || value === undefined) return "-";
    if (value === 0) return "0";
    const size = Math.abs(value);
    if (size >= 1e6) return (value / 1e6).toLocaleString("en", {maximumFractionDigits: size >= 1e8 ? 0 : 1}) + " M";
    if (size >= 1000) return Math.round(value).toLocaleString("en");
    return String(Number(value.toPrecision(3)));
  }
  function time(seconds, longest = seconds) {  // every tick of an axis in the unit of its end, below an hour in minutes
    const parts = (whole, unit) => {  // 10 min, 1:20 h
      const left = Math.round(seconds / whole * 60) % 60;
      return Math.floor(seconds / whole + 1 / 120) + (left ? ":" + String(left).padStart(2, "0") : "") + unit;
    };
    if (longest >= 7200 && seconds >= 3600) return parts(3600, " h");
    if (longest >= 180) return parts(60, " min");
    return number(seconds) + " s";
  }
  const percent = share => number(share * 100) + " %";
  function nines(place) {
    const left = 10 ** -place;
    return "p" + (left >= 0.1 ? Math.round((1 - left) * 100) : Number((100 * (1 - left)).toFixed(Math.ceil(place) - 1)));
  }
  const FORMATS = {time, percent, nines, number, count: number};
  const format = axis => FORMATS[axis.format || "number"];
  function tickWords(spec, ticks) {  // with as many digits as tell one tick from the next
    const plain = !spec.format && Math.abs(ticks.at(-1)) < 1e6;
    return ticks.map(tick => plain ? tick.toLocaleString("en", {maximumFractionDigits: 12}) : format(spec)(tick, ticks.at(-1)));
  }

  // ---- axes ----
  function linearTicks(low, high, most, whole) {
    const raw = (high - low) / Math.max(most, 1) || 1;
    const power = 10 ** Math.floor(Math.log10(raw));
    const step = whole && raw < 1 ? 1 : [1, 2, ...(whole ? [] : [2.5]), 5, 10].map(f => f * power).find(s => s >= raw * 0.999);
    const ticks = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) ticks.push(Number((i * step).toPrecision(12)));
    return ticks;
  }
  function timeTicks(low, high, most) {
    const steps = [0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 21600, 43200, 86400];
    const step = steps.find(s => (high - low) / s <= most) || (high - low) / most;
    const ticks = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high * (1 + 1e-9); i++) ticks.push(Number((i * step).toPrecision(12)));
    return ticks;
  }
  function logTicks(low, high, most) {
    const decades = Math.log10(high / low);
    const factors = decades > most ? [1] : decades * 3 > most ? [1, 3] : decades > 0.7 ? [1, 2, 5] : null;
    if (!factors) return linearTicks(low, high, most);
    const ticks = [];
    const every = Math.max(1, Math.ceil(decades / most));
    for (let d = Math.floor(Math.log10(low)); d <= Math.ceil(Math.log10(high)); d += every)
      for (const f of factors) { const t = f * 10 ** d; if (t >= low * 0.999 && t <= high * 1.001) ticks.push(Number(t.toPrecision(6))); }
    return ticks;
  }
  function ninesTicks(low, high) {
    const ticks = [0.30103, 1, 2, 3, 4, 5, 6, 7].filter(t => t <= high + 1e-9);
    return ticks;
  }
  // An axis: where a value lies between 0 and 1, and which ticks it has.
  function axis(spec, values, most) {
    let low = spec.min, high = spec.max;
    for (const value of values) {
      if (value === null || (spec.log && value <= 0)) continue;
      if (spec.min === undefined && (low === undefined || value < low)) low = value;
      if (spec.max === undefined && (high === undefined || value > high)) high = value;
    }
    if (low === undefined) [low, high] = spec.log ? [1, 10] : [0, 1];
    if (spec.log) {
      if (high <= low) { low = low / 1.5; high = high * 1.5 || 1; }
      else { const pad = (high / low) ** 0.04; if (spec.min === undefined) low /= pad; if (spec.max === undefined) high *= pad; }
      const span = Math.log(high / low);
      return {low, high, place: v => Math.log(Math.max(v, low) / low) / span, ticks: logTicks(low, high, most), back: p => low * Math.exp(p * span)};
    }
    if (high <= low) { const pad = Math.abs(low) * 0.05 || 1; high = low + pad; if (spec.min === undefined) low -= pad; }
    else if (spec.pad) { const pad = (high - low) * 0.05; if (spec.min === undefined) low = Math.max(low - pad, low >= 0 ? 0 : -Infinity); if (spec.max === undefined) high += pad; }
    const ticks = spec.format === "nines" ? ninesTicks(low, high) : spec.format === "time" ? timeTicks(low, high, most) : linearTicks(low, high, most, spec.integer_ticks);
    if (spec.max === undefined && spec.format !== "nines" && spec.format !== "time" && ticks.length > 1) {
      const step = ticks[1] - ticks[0];
      const top = Math.ceil(high / step - 1e-6) * step;
      if (top > high) { high = top; ticks.push(Number(top.toPrecision(12))); }
    }
    return {low, high, place: v => (v - low) / (high - low), ticks: [...new Set(ticks)], back: p => low + p * (high - low)};
  }

  function crosses([left, top, right, bottom], [x1, y1, x2, y2]) {  // whether a line passes through a box
    let from = 0, to = 1;
    for (const [at, step, low, high] of [[x1, x2 - x1, left, right], [y1, y2 - y1, top, bottom]]) {
      if (!step && (at < low || at > high)) return false;
      if (!step) continue;
      from = Math.max(from, Math.min((low - at) / step, (high - at) / step));
      to = Math.min(to, Math.max((low - at) / step, (high - at) / step));
    }
    return from <= to;
  }

  // ---- one chart ----
  class Chart {
    constructor(figure, spec) {
      this.figure = figure; this.spec = spec; this.hidden = new Set();
      this.zoom = null; this.from = null; this.at = null;  // part of the x axis; where a drag began; point of the keyboard
      const names = (spec.series || []).map(s => s.name).filter(Boolean).join(", ");
      const keys = "Arrow keys walk along the points, Enter opens one, drag or plus and minus zoom, Escape shows all.";
      this.svg = draw("svg", {role: "img", tabindex: 0, "aria-label": `${spec.title}${names ? ": " + names : ""}. ${keys}`});
      this.tip = document.createElement("div");
      this.tip.className = "tip";
      this.tip.setAttribute("role", "status");
      this.legend();
      this.save();
      this.whole();
      figure.append(this.svg, this.tip);
      this.svg.addEventListener("pointermove", event => { this.drag(event); this.point(event); });
      this.svg.addEventListener("pointerdown", event => { this.from = event.pointerType === "mouse" && !event.button ? this.across(event) : null; this.point(event); });
      this.svg.addEventListener("pointerup", event => this.drop(event));
      this.svg.addEventListener("pointerleave", () => { this.drop(); this.leave(); });
      this.svg.addEventListener("dblclick", () => this.look(null));
      this.svg.addEventListener("dragstart", event => event.preventDefault());  // a link is no picture to carry away
      this.svg.addEventListener("keydown", event => this.key(event));
      this.svg.addEventListener("blur", () => { this.at = null; this.leave(); });
      this.width = 0;
      this.fit();
    }
    legend() {
      const named = (this.spec.series || []).filter(s => s.name);
      if (named.length < 2) return;
      const box = document.createElement("div");
      box.className = "legend";
      for (const series of named) {
        const button = document.createElement("button");
        const swatch = document.createElement("i");
        swatch.style.background = `var(--${series.color})`;
        if (series.dash) { swatch.style.background = `repeating-linear-gradient(90deg, var(--${series.color}) 0 4px, transparent 4px 6px)`; }
        button.append(swatch, series.name);
        button.type = "button";
        button.setAttribute("aria-pressed", "true");
        button.onclick = () => {
          const off = !this.hidden.delete(series);
          if (off) this.hidden.add(series);
          button.setAttribute("aria-pressed", String(!off));
          this.paint();
        };
        box.append(button);
      }
      this.figure.append(box);
    }
    // A link that saves what the chart shows, one line a point.
    save() {
      const {spec, figure} = this;
      const link = document.createElement("a");
      link.className = "save"; link.textContent = "csv"; link.href = "data:,"; link.title = "save the data of this chart";
      link.download = spec.title.toLowerCase().replace(/[^a-z0-9]+/g, "-") + ".csv";
      link.onclick = () => {
        const cell = value => value === null || value === undefined ? "" : /[",\n]/.test(value) ? `"${String(value).replaceAll('"', '""')}"` : String(value);
        const rows = spec.cells && spec.cells.length ? [["x_from", "x_to", "y_from", "y_to", "count"], ...spec.cells] : [["series", spec.x.label || "x", spec.y.label || "y"]];
        for (const series of spec.series || []) series.x.forEach((x, i) => rows.push([series.name || "", x, series.y[i]]));
        link.href = "data:text/csv;charset=utf-8," + encodeURIComponent(rows.map(row => row.map(cell).join(",")).join("\n") + "\n");
      };
      figure.querySelector("figcaption").append(link);
    }
    // A button that shows all again, while a part is shown.
    whole() {
      this.all = document.createElement("button");
      this.all.type = "button"; this.all.className = "all"; this.all.textContent = "show all"; this.all.hidden = true;
      this.all.onclick = () => this.look(null);
      this.figure.querySelector("figcaption").append(this.all);
    }
    // ---- a part of the x axis ----
    across(event) {  // where the pointer is, in the chart's own pixels
      const box = this.svg.getBoundingClientRect();
      return Math.min(Math.max((event.clientX - box.left) * this.width / box.width, this.left), this.right);
    }
    value(px) { return this.x.back((px - this.left) / (this.right - this.left)); }
    drag(event) {
      if (this.from === null) return;
      const to = this.across(event);
      this.brush.setAttribute("x", Math.min(this.from, to));
      this.brush.setAttribute("width", Math.abs(to - this.from));
    }
    drop(event) {
      if (this.from === null) return;
      const from = this.from, to = event ? this.across(event) : from;
      this.from = null;
      this.brush.setAttribute("width", 0);
      if (Math.abs(to - from) >= 8) this.look([this.value(Math.min(from, to)), this.value(Math.max(from, to))]);
    }
    look(part) {
      this.zoom = part; this.all.hidden = !part;
      this.paint(); this.leave();
    }
    key(event) {
      const longest = (this.shown || []).reduce((a, b) => (b.x.length > a.x.length ? b : a), {x: []});
      const last = longest.x.length - 1;
      const steps = {ArrowRight: at => at === null ? 0 : at + 1, ArrowLeft: at => at === null ? last : at - 1, Home: () => 0, End: () => last};
      if (steps[event.key] && last >= 0) {
        this.at = Math.min(Math.max(steps[event.key](this.at), 0), last);
        this.show(this.px(longest.x[this.at]), this.py(longest.y[this.at] || 0));
      } else if (event.key === "Enter" && this.at !== null && longest.links && longest.links[this.at]) {
        location.href = longest.links[this.at];
      } else if (event.key === "+" || event.key === "-") {
        const middle = this.at !== null ? this.px(longest.x[this.at]) : (this.left + this.right) / 2;
        const half = (this.right - this.left) / (event.key === "+" ? 4 : 1);
        const ends = [Math.max(middle - half, this.left), Math.min(middle + half, this.right)];
        this.look(event.key === "-" ? null : ends.map(px => this.value(px)));
      } else if (event.key === "Escape") this.look(null);
      else return;
      event.preventDefault();
    }
    fit() {
      const style = getComputedStyle(this.figure);
      const width = Math.floor(this.figure.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight));
      if (width > 40 && width !== this.width) { this.width = width; this.paint(); }
    }
    paint() {
      const {spec, svg, width} = this;
      const height = spec.height || (width < 400 ? 220 : 250);
      svg.replaceChildren();
      svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
      svg.setAttribute("height", height);
      this.height = height;
      const shown = this.shown = (spec.series || []).filter(s => !this.hidden.has(s));
      const xs = [], ys = [];
      const inside = x => !this.zoom || (x >= this.zoom[0] && x <= this.zoom[1]);
      for (const s of shown) s.x.forEach((x, i) => {
        xs.push(x);
        if (inside(x)) for (const list of [s.y, s.low || [], s.high || []]) if (list[i] !== undefined) ys.push(list[i]);
      });
      for (const mark of spec.marks || []) { if (mark.y !== undefined && mark.extends_axis) ys.push(mark.y); }
      for (const band of spec.bands || []) { if (band.across) ys.push(band.from, band.to); }
      if (spec.stack) for (let i = 0; i < (shown[0] ? shown[0].y.length : 0); i++) ys.push(shown.reduce((sum, s) => sum + (s.y[i] || 0), 0));
      this.y = axis(spec.y, ys, Math.max(3, Math.floor(height / 48)));
      const words = tickWords(spec.y, this.y.ticks);
      const left = this.left = 10 + 6.6 * Math.max(3, ...words.map(w => w.length));
      const right = this.right = width - 10, top = this.top = 18, bottom = this.bottom = height - 36;
      const [min, max] = this.zoom || [spec.x.min, spec.x.max];
      this.x = axis({...spec.x, min, max}, this.zoom ? [] : xs, Math.max(3, Math.floor((right - left) / 74)));
      this.px = v => left + this.x.place(v) * (right - left);
      this.py = v => bottom - Math.min(Math.max(this.y.place(v), 0), 1) * (bottom - top);
      // What is written and drawn, of which the next label keeps clear: boxes, first the name of the y axis, and lines.
      this.labels = [[0, 0, 4 + (spec.y.label || "").length * 6.4, 12]];
      this.lines = [];  // of series
      this.rules = [];  // of marks
      if ((spec.kind || "lines") === "lines") for (const s of shown) this.keepClear(s, inside);
      for (const band of spec.bands || []) band.across ? this.bandAcross(band) : this.band(band);
      this.y.ticks.forEach((tick, i) => {
        const y = this.py(tick);
        draw("line", {x1: left, x2: right, y1: y, y2: y, class: "grid"}, svg);
        draw("text", {x: left - 6, y: y + 4, "text-anchor": "end"}, svg, words[i]);
      });
      let free = -Infinity;
      for (const tick of this.x.ticks) {
        const x = this.px(tick), word = format(spec.x)(tick, this.x.high), half = word.length * 3.3;
        draw("line", {x1: x, x2: x, y1: bottom, y2: bottom + 4, class: "axis"}, svg);
        const anchor = x + half > width ? "end" : "middle";
        if ((anchor === "end" ? width - 2 * half : x - half) < free) continue;
        free = x + half + 6;
        draw("text", {x: anchor === "end" ? width : x, y: bottom + 16, "text-anchor": anchor}, svg, word);
      }
      draw("line", {x1: left, x2: right, y1: bottom, y2: bottom, class: "axis"}, svg);
      draw("text", {x: left - 6, y: 9, "text-anchor": "start", dx: 6 - left + 4}, svg, spec.y.label || "");
      draw("text", {x: right, y: height - 4, "text-anchor": "end"}, svg, spec.x.label || "");
      const marks = (spec.marks || []).filter(mark => this.mark(mark));
      for (const mark of marks) if (mark.label) this.name(mark);
      this.svg = svg.appendChild(this.plot());
      this["paint_" + (spec.kind || "lines")]();
      this.svg = svg;
      this.brush = draw("rect", {y: top, height: bottom - top, x: left, width: 0, class: "brush"}, svg);
      this.cross = draw("line", {y1: top, y2: bottom, class: "cross", visibility: "hidden"}, svg);
    }
    plot() {  // where points are drawn: of a part of the axis nothing is seen outside it
      if (!this.zoom) return draw("g", {});
      const x = this.left - 4, width = this.right - this.left + 8, height = this.bottom + 4;
      const style = `overflow: hidden; width: ${width}px; height: ${height}px`;
      return draw("svg", {x, y: 0, width, height, viewBox: `${x} 0 ${width} ${height}`, style});
    }
    band({from, to, label, color}) {
      const x1 = this.px(Math.max(from, this.x.low)), x2 = this.px(Math.min(to, this.x.high));
      if (x2 <= x1) return;
      draw("rect", {x: x1, y: this.top, width: x2 - x1, height: this.bottom - this.top, fill: `var(--${color || "c6"})`, "fill-opacity": 0.09}, this.svg);
      const wide = (label || "").length * 6.4, middle = (x1 + x2 - wide) / 2, line = this.top + 14;
      if (label && x2 - x1 > wide + 4) this.write(label, [[middle, line], [middle, this.bottom - 8], [x1 + 3, line], [x2 - 3 - wide, line]]);
    }
    bandAcross({from, to, label, color}) {  // between two values of the y axis
      const y1 = this.py(Math.min(to, this.y.high)), y2 = this.py(Math.max(from, this.y.low));
      draw("rect", {x: this.left, y: y1, width: this.right - this.left, height: Math.max(y2 - y1, 1), fill: `var(--${color || "c6"})`, "fill-opacity": 0.14}, this.svg);
      const line = Math.max(y1 - 4, this.top + 11);
      if (label) this.write(label, [[this.left + 5, line], [this.right - 5 - label.length * 6.4, line]]);
    }
    mark({x, y, color}) {  // whether its value is on the axis
      const place = y !== undefined ? this.y.place(y) : this.x.place(x);
      if (place > 1.001 || place < 0) return false;
      const [x1, x2, y1, y2] = y !== undefined ? [this.left, this.right, this.py(y), this.py(y)] : [this.px(x), this.px(x), this.top, this.bottom];
      draw("line", {x1, x2, y1, y2, stroke: `var(--${color || "soft"})`, "stroke-dasharray": "6 4"}, this.svg);
      this.rules.push([x1, y1, x2, y2]);
      return true;
    }
    name({x, y, label, color}) {  // of a mark, along its line
      const wide = label.length * 6.4, places = [];
      if (y !== undefined) {
        const at = this.py(y), middle = (this.left + this.right - wide) / 2;
        for (const line of at - this.top < 16 ? [at + 13] : [at - 4, at + 13]) for (const left of [this.right - 5 - wide, this.left + 5, middle]) places.push([left, line]);
      } else {
        const at = this.px(x), sides = at > (this.left + this.right) / 2 ? [at - 4 - wide, at + 4] : [at + 4, at - 4 - wide];
        const known = sides.filter(left => left >= this.left && left + wide <= this.width);
        for (let line = this.bottom - 6; line > this.top + 9; line -= 12) for (const left of known.length ? known : sides.slice(0, 1)) places.push([left, line]);
        places.push([Math.min(at - wide / 2, this.width - wide), this.top - 4]);
      }
      this.write(label, places, `var(--${color || "soft"})`);
    }
    keepClear(s, inside) {  // labels shall not lie on the dots and the line of a series
      const seen = s.x.flatMap((x, i) => s.y[i] === null || !inside(x) ? [] : [[this.px(x), this.py(s.y[i]), i]]);
      if (this.dotted(s)) for (const [x, y] of seen) this.labels.push([x - 4, y - 4, x + 4, y + 4]);
      if (s.width !== 0) seen.slice(1).forEach(([x, y, i], n) => { if (seen[n][2] === i - 1) this.lines.push([seen[n][0], seen[n][1], x, y]); });
    }
    free(box, lines = [...this.lines, ...this.rules]) {
      return !this.labels.some(b => box[0] < b[2] && b[0] < box[2] && box[1] < b[3] && b[1] < box[3]) && !lines.some(line => crosses(box, line));
    }
    // A text at the first free one of the places where its line may begin; where none is free, it lies on a line.
    write(text, places, fill) {
      const box = ([x, y]) => [x, y - 9, x + text.length * 6.4, y + 3];
      const among = [undefined, this.lines, []].map(lines => places.find(place => this.free(box(place), lines)));
      const at = among.find(Boolean) || places[0];
      this.labels.push(box(at));
      draw("text", {x: at[0], y: at[1], class: "name", style: fill && `fill:${fill}`}, this.svg, text);
    }
    dotted(s) { return s.dots || s.x.length < 3 || s.y.filter(v => v !== null).length < 3; }
    label(text, x, y) {  // at the first free place about its dot, which is at x, y; nowhere if there is none
      const wide = text.length * 6.4;
      const near = [[x + 6, y - 6], [x + 6, y + 13], [x - 6 - wide, y - 6], [x - 6 - wide, y + 13], [x - wide / 2, y - 9], [x - wide / 2, y + 18]];
      for (const [left, line] of [...near, [x + 8, y + 4], [x - 8 - wide, y + 4], [x + 8, y - 14], [x - 8 - wide, y - 14], [x + 8, y + 22], [x - 8 - wide, y + 22]]) {
        const box = [left, line - 9, left + wide, line + 2];
        if (left < this.left || left + wide > this.width || line - 9 < 0 || line > this.bottom || !this.free(box)) continue;
        this.labels.push(box);
        draw("text", {x: left, y: line, class: "name"}, this.svg, text);
        return;
      }
    }
    path(xs, ys, from, to) {
      let d = "", open = false;
      for (let i = from; i < to; i++) {
        if (ys[i] === null || (this.spec.y.log && ys[i] <= 0)) { open = false; continue; }
        d += (open ? "L" : "M") + this.px(xs[i]).toFixed(1) + " " + this.py(ys[i]).toFixed(1);
        open = true;
      }
      return d;
    }
    paint_lines() {
      for (const s of this.shown) {
        const stroke = `var(--${s.color})`;
        const common = {fill: "none", stroke, "stroke-width": s.width || 1.8, "stroke-linejoin": "round", "stroke-linecap": "round"};
        let solid = s.x.length;
        if (s.solid_until !== undefined) { solid = s.x.findIndex(x => x > s.solid_until); if (solid < 0) solid = s.x.length; }
        if (s.width !== 0) draw("path", {...common, d: this.path(s.x, s.y, 0, solid), "stroke-dasharray": s.dash}, this.svg);
        (s.low || []).forEach((low, i) => {
          if (low === null || s.high[i] === null) return;
          const x = this.px(s.x[i]), y1 = this.py(low), y2 = this.py(s.high[i]);
          draw("path", {d: `M${x - 4} ${y1}H${x + 4}M${x - 4} ${y2}H${x + 4}M${x} ${y1}V${y2}`, stroke, "stroke-width": 1.4, "stroke-opacity": 0.8}, this.svg);
        });
        if (solid < s.x.length) draw("path", {...common, d: this.path(s.x, s.y, Math.max(solid - 1, 0), s.x.length), "stroke-dasharray": "2 4", "stroke-opacity": 0.75}, this.svg);
        if (this.dotted(s))
          s.x.forEach((x, i) => {
            if (s.y[i] === null) return;
            const to = s.links && s.links[i];
            const into = to ? draw("a", {href: to, tabindex: -1, "aria-label": `${s.name || ""} ${(s.labels || [])[i] || ""}`}, this.svg) : this.svg;
            draw("circle", {cx: this.px(x), cy: this.py(s.y[i]), r: to ? 4.4 : 3.4, fill: stroke}, into);
          });
        (s.labels || []).forEach((label, i) => { if (label && s.y[i] !== null && (!this.zoom || (s.x[i] >= this.zoom[0] && s.x[i] <= this.zoom[1]))) this.label(label, this.px(s.x[i]), this.py(s.y[i])); });
      }
    }
    paint_bars() {
      const xs = this.shown.length ? this.shown[0].x : [];
      const sums = xs.map(() => 0);
      for (const s of this.shown) xs.forEach((x, i) => {
        if (!s.y[i]) return;
        const y0 = this.py(sums[i]), y1 = this.py(sums[i] += s.y[i]);
        const x0 = this.px(x - this.spec.step / 2), x1 = this.px(x + this.spec.step / 2);
        draw("rect", {x: x0, y: y1, width: Math.max(x1 - x0 - 0.6, 1), height: Math.max(y0 - y1, 0.8), fill: `var(--${s.color})`}, this.svg);
      });
    }
    paint_cloud() {
      for (const s of this.shown) {
        if (s.links) { this.linked(s); continue; }
        const group = draw("g", {fill: `var(--${s.color})`, "fill-opacity": s.x.length > 400 ? 0.35 : 0.6}, this.svg);
        s.x.forEach((x, i) => draw("circle", {cx: this.px(x).toFixed(1), cy: this.py(s.y[i]).toFixed(1), r: 2.3}, group));
      }
    }
    paint_cells() {  // cells of [left, right, low, high, count], in values
      const most = Math.log1p(Math.max(1, ...this.spec.cells.map(c => c[4])));
      const group = draw("g", {fill: "var(--c1)", "shape-rendering": "crispEdges"}, this.svg);
      for (const [x0, x1, y0, y1, count] of this.spec.cells) {
        const left = this.px(x0), top = this.py(y1), right = Math.min(this.px(x1), this.right);
        draw("rect", {x: left.toFixed(2), y: top.toFixed(2), width: Math.max(right - left, 1.2).toFixed(2),
          height: Math.max(this.py(y0) - top, 1.2).toFixed(2), "fill-opacity": (0.1 + 0.9 * Math.log1p(count) / most).toFixed(3)}, group);
      }
      for (const s of this.shown) {
        if (s.links) this.linked(s);
        else draw("path", {d: this.path(s.x, s.y, 0, s.x.length), fill: "none", stroke: `var(--${s.color})`, "stroke-width": 1.6}, this.svg);
      }
    }
    linked(s) {  // points that lead to a place on the page
      s.x.forEach((x, i) => {
        const link = draw("a", {href: s.links[i], "aria-label": s.labels[i]}, this.svg);
        draw("circle", {cx: this.px(x).toFixed(1), cy: this.py(s.y[i]).toFixed(1), r: 5, fill: `var(--${s.color})`}, link);
      });
    }

    // ---- what is under the pointer ----
    point(event) {
      const box = this.svg.getBoundingClientRect();
      const scale = this.width / box.width;
      const x = (event.clientX - box.left) * scale, y = (event.clientY - box.top) * scale;
      if (x < this.left - 8 || x > this.right + 8 || y > this.bottom + 8) return this.leave();
      this.show(x, y);
    }
    show(x, y) {
      const found = this["under_" + (this.spec.kind || "lines")](x, y), scale = this.width / this.svg.getBoundingClientRect().width;
      if (!found) return this.leave();
      this.cross.setAttribute("x1", found.at); this.cross.setAttribute("x2", found.at);
      this.cross.setAttribute("visibility", "visible");
      this.tip.replaceChildren();
      const head = document.createElement("b");
      head.textContent = found.head;
      this.tip.append(head);
      for (const [color, text] of found.lines) {
        const line = document.createElement("div"), dot = document.createElement("i");
        if (color) { dot.style.background = `var(--${color})`; line.append(dot); }
        line.append(text);
        this.tip.append(line);
      }
      this.tip.style.display = "block";
      const at = found.at / scale + this.svg.offsetLeft, wide = this.tip.offsetWidth;
      this.tip.style.left = Math.max(2, at + wide + 14 > this.figure.clientWidth ? at - wide - 12 : at + 12) + "px";
      this.tip.style.top = this.svg.offsetTop + 20 + "px";
    }
    leave() { this.tip.style.display = "none"; if (this.cross) this.cross.setAttribute("visibility", "hidden"); }
    nearest(xs, x) {
      let best = -1, distance = Infinity;
      xs.forEach((v, i) => { const d = Math.abs(this.px(v) - x); if (d < distance) { distance = d; best = i; } });
      return best;
    }
    under_lines(x) {
      if (!this.shown.length) return null;
      const longest = this.shown.reduce((a, b) => (b.x.length > a.x.length ? b : a));
      const at = longest.x[this.nearest(longest.x, x)];
      if (at === undefined) return null;
      const unit = this.spec.y.unit ? " " + this.spec.y.unit : "";
      const lines = this.shown.map(s => {
        const i = this.nearest(s.x, this.px(at));
        const few = s.solid_until !== undefined && s.x[i] > s.solid_until ? " (too few samples)" : "";
        const label = s.labels && s.labels[i] ? `${s.labels[i]}: ` : "";
        return [s.color, `${s.name || ""} ${label}${format(this.spec.y)(s.y[i])}${unit}${few}`];
      });
      return {at: this.px(at), head: format(this.spec.x)(at), lines};
    }
    under_bars(x) {
      const found = this.under_lines(x);
      if (found) found.lines = found.lines.filter(([, text]) => !/ 0$/.test(text));
      return found;
    }
    under_cloud(x, y) {
      let best = null, distance = 400;
      for (const s of this.shown) s.x.forEach((v, i) => {
        const d = (this.px(v) - x) ** 2 + (this.py(s.y[i]) - y) ** 2;
        if (d < distance) { distance = d; best = [s, i]; }
      });
      if (!best) return null;
      const [s, i] = best;
      return {at: this.px(s.x[i]), head: `${format(this.spec.x)(s.x[i])} ${this.spec.x.unit || ""}`, lines: [[s.color, `${format(this.spec.y)(s.y[i])} ${this.spec.y.unit || ""}`]]};
    }
    under_cells(x, y) {
      const vx = this.x.back((x - this.left) / (this.right - this.left)), vy = this.y.back((this.bottom - y) / (this.bottom - this.top));
      const cell = this.spec.cells.find(([x0, x1, y0, y1]) => vx >= x0 && vx <= x1 && vy >= y0 && vy <= y1);
      if (!cell) return null;
      const fx = format(this.spec.x), fy = format(this.spec.y);
      return {at: x, head: `${fx(cell[0])} to ${fx(cell[1])} ${this.spec.x.unit || ""}`, lines: [["c1", `${fy(cell[2])} to ${fy(cell[3])} ${this.spec.y.unit || ""}: ${number(cell[4])}`]]};
    }
  }

  const drawn = [...document.querySelectorAll("figure[data-chart]")].map(f => new Chart(f, charts[Number(f.dataset.chart)]));
  const fitAll = () => drawn.forEach(chart => chart.fit());
  if (window.ResizeObserver) new ResizeObserver(() => requestAnimationFrame(fitAll)).observe(document.body);
  else window.addEventListener("resize", fitAll);
  const folded = () => document.querySelectorAll("details:not([open])");
  let opened = [];
  window.addEventListener("beforeprint", () => {  // half a sheet of A4 each, so that letters stay letters
    opened = [...folded()];
    opened.forEach(d => { d.open = true; });
    drawn.forEach(c => { c.width = c.figure.classList.contains("wide") ? 690 : 340; c.paint(); });
  });
  window.addEventListener("afterprint", () => { opened.forEach(d => { d.open = false; }); fitAll(); });

  // A link to a place that is folded away, or in something that is, unfolds it.
  const unfold = () => {
    const place = location.hash.length > 1 && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    for (let node = place; node; node = node.parentElement) if (node.tagName === "DETAILS") node.open = true;
    if (place) place.scrollIntoView();
  };
  window.addEventListener("hashchange", unfold);
  unfold();
  document.getElementById("print").onclick = () => window.print();
  const button = document.getElementById("theme");
  const themes = ["auto", "light", "dark"];
  let theme = 0;
  button.onclick = () => {
    theme = (theme + 1) % 3;
    if (theme) document.documentElement.dataset.theme = themes[theme]; else delete document.documentElement.dataset.theme;
    button.textContent = "theme: " + themes[theme];
  };
})();
