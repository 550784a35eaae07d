// Memory alive at the chosen moment, by category; also the legend of the chart.

function showAlive(timeline, place) {
  const { data, names, colours, layers, allocated, reserved, device, events } = timeline;
  const isPeak = events[place] === data.peak;
  const total = allocated[place];
  const rows = names.map((name, i) => ({ name, colour: colours[i], size: layers[i][place] }));
  const biggest = Math.max(1, ...rows.map((row) => row.size));
  const body = rows.reverse().map(({ name, colour, size }) => {
    const bar = draw("svg", { class: "bar", viewBox: "0 0 100 6", preserveAspectRatio: "none",
      "aria-hidden": "true" }, draw("rect", { width: (100 * size) / biggest, height: 6 }));
    bar.style.fill = colour;
    return make("tr", {},
      make("th", { scope: "row" }, swatch(colour), name),
      make("td", { class: "number" },
        make("data", { value: size, "data-category": name }, formatBytes(size)), bar),
      make("td", { class: "number" }, formatShare(size, total)));
  });
  const ledgers = data.on_gpu
    ? [["allocated", total], ["reserved", reserved[place]], ["device", device[place]]]
    : [["tensors", total]];
  const phase = timeline.phaseAt(events[place]);
  byId("alive").replaceChildren(
    make("h3", {}, isPeak ? "Alive at the peak" : "Alive at this moment"),
    make("p", {}, `${phase ? phase + ", " : ""}event ${formatCount(events[place])} of ` +
      formatCount(data.stop)),
    make("table", {}, make("tbody", {}, ...body),
      make("tfoot", {}, ...ledgers.map(([name, size]) => make("tr", { class: name },
        make("th", { scope: "row" },
          ...(name === "device" ? [make("i", { class: "swatch line" })] : []), name),
        make("td", { class: "number" },
          make("data", { value: size, "data-ledger": name }, formatBytes(size))),
        make("td"))))));
}

// The peak of every phase as a table, for readers who cannot see the chart.
function showPhases(timeline) {
  const { data, names, layers, allocated, device } = timeline;
  const phases = data.phases.length ? data.phases : [["whole", 0, data.stop, data.peak]];
  const shown = names.map((name, i) => i).filter((i) => layers[i].some((size) => size > 0));
  const ledgers = data.on_gpu ? ["allocated", "device"] : ["tensors"];
  byId("phase-table").replaceChildren(make("table", {},
    make("caption", {}, "The moment of the most allocated in each phase"),
    make("thead", {}, make("tr", {},
      ...["phase", "event", ...ledgers, ...shown.map((i) => names[i])].map((name, i) =>
        make("th", { scope: "col", class: i ? "number" : "" }, name)))),
    make("tbody", {}, ...phases.map(([name, , , top]) => {
      const place = timeline.sampleAt(top);
      const sizes = [allocated[place], ...(data.on_gpu ? [device[place]] : []),
        ...shown.map((i) => layers[i][place])];
      return make("tr", {}, make("th", { scope: "row" }, name),
        make("td", { class: "number" }, formatCount(top)),
        ...sizes.map((size) => make("td", { class: "number" }, formatBytes(size))));
    }))));
}
