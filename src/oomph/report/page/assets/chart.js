// Memory over time: stacked categories, lines for ledgers and budget, phases and blocks below.

const HEIGHT = 340, TOP = 18, LEFT = 66, RIGHT = 14, STRIP = 20;

function makeChart(timeline, onChoose) {
  const { data, events, layers, allocated, device } = timeline;
  const box = byId("chart");
  const strips = [
    ["phases", data.phases.map(([name, start, stop]) => [name, start, stop])],
    ["parts", data.parts],
    ["blocks", data.model_blocks.pieces.map(([name, start, stop]) =>
      [data.model_blocks.names[name], start, stop])],
  ].filter(([, pieces]) => pieces.length);
  const tip = make("div", { class: "tip", hidden: true });
  const height = TOP + HEIGHT + 8 + STRIP * strips.length + 6;
  const svg = draw("svg", { "aria-hidden": "true", height, width: "100%" });
  box.append(svg, tip);
  const whole = [0, data.stop];
  let view = whole, chosen = timeline.sampleAt(data.peak), width = 0, cursor, hover;

  const x = (event) => LEFT + ((event - view[0]) / (view[1] - view[0])) * (width - LEFT - RIGHT);
  const eventAt = (px) =>
    view[0] + ((px - LEFT) / (width - LEFT - RIGHT)) * (view[1] - view[0]);

  function highest() {
    const lines = data.lines.flatMap((line) => line.points.map((point) => point[1]));
    let most = Math.max(1, ...lines);
    for (const size of device) most = Math.max(most, size);
    // A budget far above would flatten the chart, so then it is only named, not drawn to scale.
    return data.budget && data.budget < 2.2 * most ? Math.max(most, data.budget) : most;
  }
  const most = highest() * 1.04;
  const y = (size) => TOP + HEIGHT * (1 - size / most);

  // At most two samples per pixel column: its highest and its lowest.
  function visible() {
    const first = Math.max(placeOf(events, view[0]), 0);
    const last = placeOf(events, view[1]);
    const columns = Math.max(Math.floor(width - LEFT - RIGHT), 1);
    if (last - first < 2 * columns) {
      return Array.from({ length: last - first + 1 }, (_, i) => first + i);
    }
    const kept = [];
    for (let start = first; start <= last;) {
      const column = Math.floor(x(events[start]));
      let low = start, high = start, next = start;
      while (next <= last && Math.floor(x(events[next])) === column) {
        if (allocated[next] > allocated[high]) high = next;
        if (allocated[next] < allocated[low]) low = next;
        next++;
      }
      kept.push(...(low === high ? [low] : [Math.min(low, high), Math.max(low, high)]));
      start = next;
    }
    return kept;
  }

  const round = (number) => Math.round(number * 10) / 10;

  // A step function: sizes stay constant until the next event.
  function steps(places, sizes) {
    let path = `M${round(x(Math.max(events[places[0]], view[0])))} ${round(y(sizes[0]))}`;
    for (let i = 1; i < places.length; i++) {
      path += `H${round(x(events[places[i]]))}V${round(y(sizes[i]))}`;
    }
    return `${path}H${round(x(view[1]))}`;
  }

  function stepsBack(places, sizes) {
    let path = `V${round(y(sizes[places.length - 1]))}`;
    for (let i = places.length - 1; i > 0; i--) {
      path += `H${round(x(events[places[i]]))}V${round(y(sizes[i - 1]))}`;
    }
    return `${path}H${round(x(Math.max(events[places[0]], view[0])))}Z`;
  }

  function stack(places) {
    let floor = new Float64Array(places.length);
    const shapes = layers.map((layer, i) => {
      const ceiling = floor.map((size, at) => size + layer[places[at]]);
      const path = steps(places, ceiling) + stepsBack(places, floor);
      floor = ceiling;
      // Outlined in its own colour, because a peak of a few events is thinner than a pixel.
      return draw("path", { class: "layer", d: path, fill: timeline.colours[i],
        stroke: timeline.colours[i] });
    });
    return shapes.reverse(); // so that an outline covers the layer above, not the one below
  }

  function axis() {
    const [unit, scale] = UNITS.find(([, size]) => most >= 2 * size) || ["B", 1];
    const rough = most / scale / 5;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].find((one) => one * power >= rough) * power;
    const marks = [];
    for (let value = 0; value * scale <= most; value += step) {
      const at = y(value * scale);
      marks.push(draw("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: at, y2: at }));
      const text = `${Number(value.toFixed(3))} ${unit}`;
      const label = { class: "axis", x: LEFT - 8, y: at + 4, "text-anchor": "end" };
      marks.push(draw("text", label, text));
    }
    return marks;
  }

  function strip([kind, pieces], row) {
    const top = TOP + HEIGHT + 8 + row * STRIP;
    const shapes = [];
    pieces.forEach(([name, start, stop], i) => {
      const from = Math.max(x(start), LEFT), to = Math.min(x(stop), width - RIGHT);
      if (to - from < 1) return;
      const shade = kind === "phases" ? "even" : i % 2 ? "odd" : "even";
      shapes.push(draw("rect", { class: `piece ${kind} ${shade}`, x: from, y: top,
        width: Math.max(to - from - 1, 0.5), height: STRIP - 3, rx: 2 }));
      const short = kind === "blocks" ? name.split(".").pop() : name;
      if (short.length * 6.4 + 8 < to - from) {
        shapes.push(draw("text", { class: "piece-name", x: (from + to) / 2, y: top + 12.5,
          "text-anchor": "middle" }, short));
      }
      if (kind === "phases" && x(start) > LEFT + 1) {
        shapes.push(draw("line", { class: "boundary", x1: from, x2: from, y1: TOP, y2: top }));
      }
    });
    return shapes;
  }

  function level(size, name, kind, side = "end") {
    const above = y(size) < TOP + 14 ? 14 : -5;
    const at = side === "end" ? width - RIGHT - 4 : LEFT + 6;
    return [
      draw("line", { class: kind, x1: LEFT, x2: width - RIGHT, y1: y(size), y2: y(size) }),
      draw("text", { class: `${kind} name`, x: at, y: y(size) + above, "text-anchor": side }, name),
    ];
  }

  function overlay({ name, points }) {
    if (points.length === 1) {
      return level(points[0][1], `${name} ${formatBytes(points[0][1])}`, "measured", "start");
    }
    let path = "";
    points.forEach(([event, size], i) => {
      const at = `${round(x(event))}`;
      path += i ? `H${at}V${round(y(size))}` : `M${at} ${round(y(size))}`;
    });
    const last = points.findLast(([event]) => event <= view[1]) || points[0];
    return [
      draw("path", { class: "measured", d: path, "clip-path": "url(#plot)" }),
      draw("text", { class: "measured name", x: width - RIGHT - 4, y: y(last[1]) - 6,
        "text-anchor": "end" }, name),
    ];
  }

  function limits() {
    if (!data.budget) return [];
    const name = `budget ${formatBytes(data.budget)}`;
    if (data.budget <= most) return level(data.budget, name, "budget");
    const at = { class: "budget name", x: width - RIGHT - 4, y: TOP - 5, "text-anchor": "end" };
    return [draw("text", at, `${name}, above this chart`)];
  }

  function peak() {
    const at = x(data.peak), place = timeline.sampleAt(data.peak);
    if (at < LEFT || at > width - RIGHT) return [];
    const side = at > width / 2 ? "end" : "start";
    return [
      draw("circle", { class: "peak", cx: at, cy: y(allocated[place]), r: 4 }),
      draw("text", { class: "peak name", x: at + (side === "end" ? -8 : 8),
        y: Math.max(y(allocated[place]) - 7, 12), "text-anchor": side },
      `peak ${formatBytes(allocated[place])}`),
    ];
  }

  function redraw() {
    width = box.clientWidth;
    if (width < LEFT + RIGHT + 20) return;
    const places = visible();
    const plot = draw("clipPath", { id: "plot" }, draw("rect",
      { x: LEFT, y: 0, width: width - LEFT - RIGHT, height }));
    cursor = draw("line", { class: "cursor", y1: TOP, y2: height - 6 });
    hover = draw("line", { class: "hover", y1: TOP, y2: height - 6, visibility: "hidden" });
    const ledger = data.on_gpu
      ? [draw("path", { class: "device", d: steps(places, places.map((at) => device[at])) })] : [];
    svg.replaceChildren(
      draw("defs", {}, plot), ...axis(),
      draw("g", { "clip-path": "url(#plot)" }, ...stack(places), ...ledger),
      ...strips.flatMap(strip), ...limits(), ...data.lines.flatMap(overlay), ...peak(),
      hover, cursor,
    );
    showCursor();
  }

  function showCursor() {
    const at = x(events[chosen]);
    const outside = at < LEFT - 0.5 || at > width - RIGHT + 0.5;
    fill(cursor, { x1: at, x2: at, visibility: outside ? "hidden" : "visible" }, []);
  }

  function describe(place) {
    const event = events[place], phase = timeline.phaseAt(event);
    const ledgers = data.on_gpu
      ? `${formatBytes(allocated[place])} allocated, ${formatBytes(device[place])} on the device`
      : `${formatBytes(allocated[place])} of tensors`;
    return `${phase ? phase + ", " : ""}event ${formatCount(event)}: ${ledgers}`;
  }

  function choose(place) {
    chosen = bounded(place, 0, events.length - 1);
    const at = events[chosen];
    if (at < view[0] || at > view[1]) show(centred(at, view[1] - view[0]));
    fill(box, { "aria-valuemin": 0, "aria-valuemax": data.stop, "aria-valuenow": at,
      "aria-valuetext": describe(chosen) }, []);
    if (width) showCursor();
    onChoose(chosen);
  }

  function centred(event, span) {
    const start = bounded(event - span / 2, 0, Math.max(data.stop - span, 0));
    return [start, Math.min(start + span, data.stop)];
  }

  function show([start, stop]) {
    view = stop - start < 4 ? centred((start + stop) / 2, 4) : [start, stop];
    redraw();
  }

  const zoom = (factor) => show(centred(events[chosen], (view[1] - view[0]) * factor));

  function showTip(place, px) {
    const rows = timeline.names.map((name, i) => [name, layers[i][place], timeline.colours[i]])
      .filter(([, size]) => size > 0).sort((a, b) => b[1] - a[1]).slice(0, 6);
    tip.replaceChildren(make("strong", {}, describe(place)), ...rows.map(([name, size, colour]) =>
      make("span", {}, swatch(colour), name, make("b", {}, formatBytes(size)))));
    tip.hidden = false;
    const left = px + 14 + tip.offsetWidth > width ? px - 14 - tip.offsetWidth : px + 14;
    tip.style.transform = `translate(${Math.max(left, 0)}px, ${TOP + 4}px)`;
    const at = x(events[place]);
    fill(hover, { x1: at, x2: at, visibility: "visible" }, []);
  }

  function hideTip() {
    tip.hidden = true;
    if (hover) hover.setAttribute("visibility", "hidden");
  }

  let dragFrom = null, brush = null;
  const pixel = (event) => event.clientX - box.getBoundingClientRect().left;
  const placeAt = (px) => timeline.sampleAt(eventAt(bounded(px, LEFT, width - RIGHT)));

  box.addEventListener("pointerdown", (event) => {
    if (event.button === 0) dragFrom = pixel(event);
  });
  box.addEventListener("pointermove", (event) => {
    const px = pixel(event);
    if (dragFrom !== null && Math.abs(px - dragFrom) > 6) {
      if (!brush) {
        box.setPointerCapture(event.pointerId);
        svg.append(brush = draw("rect", { class: "brush", y: TOP, height: HEIGHT }));
      }
      const from = Math.max(Math.min(px, dragFrom), LEFT);
      fill(brush, { x: from, width: Math.max(Math.max(px, dragFrom) - from, 0) }, []);
      hideTip();
    } else if (px >= LEFT && px <= width - RIGHT) showTip(placeAt(px), px);
    else hideTip();
  });
  box.addEventListener("pointerup", (event) => {
    if (dragFrom === null) return;
    const px = bounded(pixel(event), LEFT, width - RIGHT);
    const from = eventAt(bounded(dragFrom, LEFT, width - RIGHT)), to = eventAt(px);
    dragFrom = null;
    if (brush) {
      brush = null;
      byId("window").value = "";
      show([Math.min(from, to), Math.max(from, to)]);
    } else choose(placeAt(px));
  });
  box.addEventListener("pointercancel", () => { dragFrom = brush = null; redraw(); });
  box.addEventListener("pointerleave", hideTip);
  box.addEventListener("dblclick", () => show(whole));
  box.addEventListener("keydown", (event) => {
    const far = Math.max(Math.round(events.length / 40), 2);
    const moves = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1, PageUp: far,
      PageDown: -far };
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key in moves) choose(chosen + moves[event.key]);
    else if (event.key === "Home") choose(0);
    else if (event.key === "End") choose(events.length - 1);
    else if (event.key === "+") zoom(0.5);
    else if (event.key === "-") zoom(2);
    else if (event.key === "Escape") show(whole);
    else return;
    event.preventDefault();
  });
  new ResizeObserver(redraw).observe(box);

  return { choose, show, zoom, whole, get chosen() { return chosen; } };
}

const swatch = (colour) => {
  const mark = make("i", { class: "swatch" });
  mark.style.background = colour;
  return mark;
};
