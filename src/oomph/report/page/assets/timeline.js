// The recorded memory, and the allocations that are alive at one moment.

const read = (id) => JSON.parse(byId(id).textContent);

const KNOWN = ["parameter", "buffer", "optimizer state", "gradient", "input", "activation",
  "workspace", "temporary"];

function readTimeline(data) {
  const list = data.allocations;
  const count = list.size.length;
  const sizes = new Float64Array(count);
  const births = restore(list.birth);
  const deaths = new Float64Array(count);
  for (let i = 0; i < count; i++) {
    sizes[i] = list.sizes[list.size[i]];
    deaths[i] = list.life[i] ? births[i] + list.life[i] : Infinity;
  }
  const layers = data.sizes.map(restore);
  const allocated = restore(data.allocated);
  const rounding = allocated.map((total, i) =>
    total - layers.reduce((sum, layer) => sum + layer[i], 0));
  const names = [...data.categories];
  if (rounding.some((size) => size > 0)) {
    layers.push(rounding);
    names.push("rounding");
  }
  const others = names.filter((name) => !KNOWN.includes(name) && name !== "rounding");
  const colours = names.map((name) => {
    if (name === "rounding") return "var(--c8)";
    const place = KNOWN.includes(name) ? KNOWN.indexOf(name) : others.indexOf(name) % 8;
    return `var(--c${place})`;
  });
  const reserved = restore(data.reserved);
  return {
    data, names, colours, layers, allocated, reserved,
    device: reserved.map((size) => size + data.overhead),
    events: restore(data.events),
    count, sizes, births, deaths,
    category: list.category, module: list.module, op: list.op,
    modules: list.modules, ops: list.ops, unlisted: list.of - count,
    phaseAt(event) {
      const phase = data.phases.find(([, start, stop]) => start <= event && event < stop);
      return phase ? phase[0] : "";
    },
    isAlive: (i, event) => births[i] <= event && event < deaths[i],
    // The index of the sample with the memory after an event.
    sampleAt(event) { return Math.max(placeOf(this.events, event), 0); },
  };
}

const moduleName = (path) => path || "(outside the model)";
const blockNumbersHidden = (path) =>
  path.split(".").map((part) => (/^\d+$/.test(part) ? "*" : part)).join(".");
