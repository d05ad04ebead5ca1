// The charts of a run's page. `view` says how they are drawn, and every change of it draws them again from the data.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const form = document.querySelector(".controls");
  if (!form) return;
  const reset = form.querySelector("button");
  const folds = [...document.querySelectorAll("details")].map(part => ({part, open: part.open}));
  const DASHES = [[], [6, 4], [2, 3], [8, 3, 2, 3]];
  const HUES = 8;
  const KEEP = "lm:" + document.title.replace(/: \w+$/, "");  // the view outlives a page that loads itself again
  const view = {x: "step", log: false, smooth: 0, zoom: null, hidden: {}, open: {}};
  let plots = [];

  // ---- numbers

  const SIZES = [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "K"]];

  function count(value, digits = 3) {
    const [size, suffix] = SIZES.find(([size]) => Math.abs(value) >= size) || [1, ""];
    return String(+(value / size).toPrecision(digits)) + suffix;
  }

  // Counts along an axis, with as many digits as tell them apart.
  function counts(values) {
    const digits = [3, 4, 5, 6].find(digits => new Set(values.map(value => count(value, digits))).size === values.length);
    return values.map(value => count(value, digits || 7));
  }

  // A value in the format that the metric has in Python: {:.4f}, {:.2e}, {:.1%}, {:.4g}, {:,.0f} or count.
  function shown(value, form) {
    if (form === "count") return count(value);
    const [, digits, kind] = form.match(/\.(\d+)([efg%])/);
    if (kind === "%") return (100 * value).toFixed(digits) + "%";
    if (kind === "f") return value.toFixed(digits);
    if (kind === "e") return value.toExponential(digits);
    return Math.abs(value) >= 1e6 ? value.toExponential(digits - 1) : String(+value.toPrecision(digits));
  }

  function shownX(value) {
    if (view.x === "tokens") return count(value) + " tokens";
    return view.x === "step" ? "step " + Math.round(value).toLocaleString("en") : value.toFixed(2) + " h";
  }

  // The exponential moving average of `lm.runs.history.smooth`.
  function smoothed(values, weight) {
    let mean = 0, total = 0;
    return values.map(value => {
      if (value === null) return null;
      mean = weight * mean + (1 - weight) * value;
      total = weight * total + (1 - weight);
      return mean / total;
    });
  }

  // ---- one chart

  const keyOf = (chart, curve) => chart.title + "\n" + curve.label;

  const style = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  const hue = index => style("--c" + index % HUES);
  const dash = index => DASHES[Math.floor(index / HUES) % DASHES.length];

  // The whole x axis: the same for all charts, so that they can be read one below the other.
  function wholeRange() {
    const ends = data.tables.map(table => table[view.x]).flatMap(xs => [xs[0], xs[xs.length - 1]]);
    const low = Math.min(...ends), high = Math.max(...ends);
    return high > low ? [low, high] : [low - 0.5, high + 0.5];
  }

  function padded(u, low, high, key) {
    if (u.scales[key].distr === 3) return low === null ? [1, 10] : [low * 0.97, high * 1.03];
    if (low === null) return [0, 1];
    const flat = high - low <= 1e-6 * Math.abs(high);  // up to the rounding of a smoothed line
    const space = flat ? Math.abs(low) * 0.1 || 1 : 0.06 * (high - low);
    return [low - space, high + space];
  }

  // Round numbers on a log scale, on which uPlot has one or none within a decade.
  function logSplits(u, axis, low, high) {
    if (high / low > 10) {
      const decades = Array.from({length: 40}, (_, index) => 10 ** (Math.floor(Math.log10(low)) + index));
      const factors = high / low > 1000 ? [1] : [1, 2, 5];
      return decades.flatMap(decade => factors.map(factor => factor * decade)).filter(split => split >= low && split <= high);
    }
    const size = 10 ** Math.floor(Math.log10((high - low) / 3));
    const each = [1, 2, 5, 10].map(factor => factor * size).find(each => (high - low) / each <= 6);
    return Array.from({length: 7}, (_, index) => (Math.ceil(low / each) + index) * each).filter(split => split <= high);
  }

  // The columns and series of uPlot: of every curve its band, faint values where a smoothed line is drawn, and its line.
  function build(chart) {
    const tables = [], series = [{}], bands = [], lines = [];
    const joined = {paths: uPlot.paths.linear(), spanGaps: false, points: {show: false}};
    chart.curves.forEach((curve, index) => {
      const columns = [data.tables[curve.table][view.x]], stroke = hue(index);
      const show = !view.hidden[keyOf(chart, curve)], smooth = view.smooth > 0 && !curve.points;
      const edge = {...joined, show, stroke: stroke + (smooth ? "30" : "70"), width: 0.75};
      if (curve.low) {
        bands.push({series: [series.length + 1, series.length], fill: stroke + (smooth ? "1c" : "38")});
        columns.push(curve.low, curve.high);
        series.push(edge, {...edge});
      }
      if (smooth) {
        columns.push(curve.mean);
        series.push({...joined, show, stroke: stroke + "50", width: 1});
      }
      columns.push(smooth ? smoothed(curve.mean, view.smooth) : curve.mean);
      lines.push(series.length);
      const few = curve.mean.length <= 60 && (curve.points || curve.mean.length <= 30);
      series.push({...joined, show, stroke, width: 1.75, dash: dash(index),
        points: {show: few || curve.mean.length === 1, size: 5, fill: stroke, stroke}});
      tables.push(columns);
    });
    return {columns: uPlot.join(tables), series, bands, lines};
  }

  // Whether a log scale can show all of it.
  function positive(chart) {
    return chart.curves.every(curve => (curve.low || curve.mean).every(value => value === null || value > 0));
  }

  function draw(plot) {
    const number = +plot.dataset.chart, chart = data.charts[number];
    const {columns, series, bands, lines} = build(chart);
    const log = view.log && chart.place === "Loss" && positive(chart);
    const muted = style("--muted"), grid = {stroke: style("--grid"), width: 1};
    const axis = {stroke: muted, grid, ticks: {...grid, size: 5}, font: "12px system-ui, sans-serif"};
    const legend = element("div", "legend");
    legend.setAttribute("aria-live", "off");
    const u = new uPlot({
      width: Math.max(200, plot.clientWidth), height: plot.closest(".wide") ? 320 : 200, padding: [8, 14, 0, 0], bands, series,
      scales: {x: {time: false, range: () => view.zoom || wholeRange()}, y: {distr: log ? 3 : 1, range: padded}},
      axes: [
        {...axis, size: 28, values: (u, values) => view.x === "hours" ? values.map(value => +value.toFixed(4)) : counts(values)},
        {...axis, size: 58, values: (u, values) => values.map(value => label(value, chart)),
          ...(log ? {splits: logSplits, filter: (u, splits) => splits} : {})},
      ],
      legend: {show: false},
      cursor: {
        sync: {key: "run", filters: {pub: type => type.startsWith("mouse") && !/down|up/.test(type)}},
        drag: {x: true, y: false, setScale: false}, hover: {skip: [undefined, null]}, y: false,
        points: {size: (u, index) => lines.includes(index) ? 7 : 0}, bind: {dblclick: () => () => zoom(null)},
      },
      hooks: {
        draw: [u => annotate(u, chart)],
        setCursor: [u => tell(u, legend, chart, lines)],
        setSelect: [u => {
          const {left, width} = u.select;
          if (width < 4) return;
          u.setSelect({left: 0, top: 0, width: 0, height: 0}, false);
          zoom([u.posToVal(left, "x"), u.posToVal(left + width, "x")]);
        }],
      },
    }, columns, plot);
    plot.append(legend);
    fillLegend(legend, chart, number);
    tell(u, legend, chart, lines);
    return u;
  }

  function label(value, chart) {
    const form = chart.curves[0].form;
    if (form.endsWith("%}")) return +(100 * value).toPrecision(4) + "%";
    const size = Math.abs(value);
    if (form === "count" || size >= 1e4 && size < 1e15) return count(value);
    return size && (size < 1e-3 || size >= 1e4) ? (+value.toPrecision(3)).toExponential() : String(+value.toPrecision(6));
  }

  // A cross for values that are not finite.
  function annotate(u, chart) {
    const {ctx, bbox} = u, ratio = devicePixelRatio || 1;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    ctx.strokeStyle = style("--bad");
    ctx.lineWidth = 1.5 * ratio;
    for (const curve of chart.curves) {
      for (const place of curve.bad) {
        const x = u.valToPos(data.tables[curve.table][view.x][place], "x", true), y = bbox.top + 20 * ratio, r = 3 * ratio;
        ctx.beginPath();
        ctx.moveTo(x - r, y - r); ctx.lineTo(x + r, y + r);
        ctx.moveTo(x - r, y + r); ctx.lineTo(x + r, y - r);
        ctx.stroke();
      }
    }
    ctx.restore();
  }

  // ---- the legend: values under the crosshair, or the last ones; a click hides a curve

  function element(name, kind) {
    const made = document.createElement(name);
    made.className = kind;
    return made;
  }

  function fillLegend(legend, chart, number) {
    legend.append(element("span", "x"));
    chart.curves.forEach((curve, index) => {
      const key = keyOf(chart, curve), button = element("button", "");
      button.type = "button";
      button.setAttribute("aria-pressed", String(!view.hidden[key]));
      button.title = "show or hide";
      button.append(swatch(index), document.createTextNode(""));
      button.addEventListener("click", () => {
        view.hidden[key] = !view.hidden[key];
        drawAll();
        document.querySelectorAll(`[data-chart="${number}"] .legend button`)[index].focus();
      });
      legend.append(button);
    });
  }

  function swatch(index) {
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    const line = document.createElementNS("http://www.w3.org/2000/svg", "line");
    const attributes = {x1: 0, x2: 20, y1: 4, y2: 4, stroke: hue(index), "stroke-width": 2.5, "stroke-dasharray": dash(index).join(" ")};
    Object.entries(attributes).forEach(([name, value]) => line.setAttribute(name, value));
    svg.setAttribute("aria-hidden", "true");
    svg.append(line);
    return svg;
  }

  function tell(u, legend, chart, lines) {
    if (!legend.firstChild) return;
    const over = u.cursor.left >= 0 && u.cursor.idx !== null;
    const last = values => { let at = values.length - 1; while (at > 0 && values[at] == null) at--; return at; };
    legend.firstChild.textContent = shownX(over ? u.posToVal(u.cursor.left, "x") : u.data[0][u.data[0].length - 1]);
    chart.curves.forEach((curve, index) => {
      const values = u.data[lines[index]], at = over ? u.cursor.idxs[lines[index]] : last(values);
      const value = at == null ? null : values[at];
      const name = chart.curves.length > 1 || curve.label !== chart.title ? curve.label + " " : "";
      legend.children[index + 1].lastChild.textContent = name + (value == null ? "not finite" : shown(value, curve.form));
    });
  }

  // ---- zoom, keys, controls

  function zoom(range) {
    const [low, high] = wholeRange();
    if (range) {
      const width = Math.min(range[1] - range[0], high - low);
      const from = Math.max(low, Math.min(range[0], high - width));
      range = width > (high - low) * 1e-5 && width < high - low ? [from, from + width] : width >= high - low ? null : view.zoom;
    }
    view.zoom = range;
    reset.disabled = !range;
    const [min, max] = range || [low, high];
    plots.forEach(u => u.setScale("x", {min, max}));
    keep();
  }

  function onKey(u, event) {
    const {min, max} = u.scales.x, middle = u.cursor.left >= 0 ? u.posToVal(u.cursor.left, "x") : (min + max) / 2;
    const width = u.over.clientWidth, legend = u.root.parentNode.querySelector(".legend");
    const move = pixels => {
      const left = u.cursor.left < 0 ? width / 2 : u.cursor.left + pixels;
      legend.setAttribute("aria-live", "polite");
      u.setCursor({left: Math.max(0, Math.min(width - 1, left)), top: 0}, true, true);
    };
    const scaled = factor => zoom([middle - (middle - min) * factor, middle + (max - middle) * factor]);
    const actions = {
      ArrowLeft: () => move(-width / 100), ArrowRight: () => move(width / 100),
      "+": () => scaled(0.5), "=": () => scaled(0.5), "-": () => scaled(2), 0: () => zoom(null), Escape: () => zoom(null),
    };
    if (!actions[event.key] || event.ctrlKey || event.metaKey || event.altKey || event.target.closest("button")) return;
    event.preventDefault();
    actions[event.key]();
  }

  function drawAll() {
    plots.forEach(u => u.destroy());
    plots = [...document.querySelectorAll(".plot")].map(plot => {
      plot.replaceChildren();
      return draw(plot);
    });
    reset.disabled = !view.zoom;
    form.elements.x.value = view.x;
    form.elements.log.checked = view.log;
    form.elements.smooth.value = view.smooth;
    form.querySelector("output").textContent = (+view.smooth).toFixed(2).replace(/^0\.00$/, "0");
    keep();
  }

  function keep() {
    const changed = folds.filter(fold => fold.part.open !== fold.open);
    view.open = Object.fromEntries(changed.map(fold => [fold.part.firstChild.textContent, fold.part.open]));
    try { sessionStorage.setItem(KEEP, JSON.stringify(view)); } catch { /* the browser keeps nothing for files */ }
  }

  function restore() {
    try { Object.assign(view, JSON.parse(sessionStorage.getItem(KEEP) || "{}")); } catch { /* as above */ }
    const [low, high] = data.tables.length ? wholeRange() : [0, 0];
    if (view.zoom && (view.zoom[0] >= high || view.zoom[1] <= low)) view.zoom = null;
    folds.forEach(({part, open}) => { part.open = view.open[part.firstChild.textContent] ?? open; });
  }

  restore();
  form.hidden = false;
  document.querySelectorAll(".plot").forEach((plot, index) => {
    plot.tabIndex = 0;
    plot.setAttribute("role", "group");
    plot.setAttribute("aria-label", `Chart of ${data.charts[index].title}; the table below has its figures`);
    plot.addEventListener("keydown", event => onKey(plots[index], event));
  });
  form.addEventListener("submit", event => event.preventDefault());
  form.addEventListener("input", () => {
    const x = form.elements.x.value;
    if (x !== view.x) view.zoom = null;
    Object.assign(view, {x, log: form.elements.log.checked, smooth: +form.elements.smooth.value});
    drawAll();
  });
  reset.addEventListener("click", () => zoom(null));
  folds.forEach(({part}) => part.addEventListener("toggle", keep));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  let width = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; drawAll(); } });
  let folded = [];
  addEventListener("beforeprint", () => {
    folded = folds.map(({part}) => part).filter(part => !part.open);
    folded.forEach(part => { part.open = true; });
    document.documentElement.classList.add("printed");
    drawAll();
  });
  addEventListener("afterprint", () => {
    folded.forEach(part => { part.open = false; });
    document.documentElement.classList.remove("printed");
    drawAll();
  });
  drawAll();
})();
