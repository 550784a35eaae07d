// Helpers that create elements, and that format numbers as the rest of oomph does.

const byId = (id) => document.getElementById(id);

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

const make = (tag, attributes = {}, ...children) =>
  fill(document.createElement(tag), attributes, children);

const draw = (tag, attributes = {}, ...children) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

// Python rounds ties to the even digit, toFixed away from zero.
function fixed(value, digits) {
  const scale = 10 ** digits;
  const scaled = value * scale;
  if ((value * 8) % 1 === 0 && Math.abs(scaled % 1) === 0.5) {
    const below = Math.floor(scaled);
    return ((below % 2 ? below + 1 : below) / scale).toFixed(digits);
  }
  return value.toFixed(digits);
}

const UNITS = [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]];

function formatBytes(size) {
  if (size < 0) return "-" + formatBytes(-size);
  for (const [unit, scale] of UNITS) {
    if (size >= scale) {
      const value = size / scale;
      return `${fixed(value, value < 100 ? 2 : 1)} ${unit}`;
    }
  }
  return `${Math.trunc(size)} B`;
}

const formatCount = (number) => number.toLocaleString("en-US");

function formatShare(size, total) {
  const percent = total ? (100 * size) / total : 0;
  return percent > 0 && percent < 1 ? "<1 %" : `${fixed(percent, 0)} %`;
}

// Decodes delta-encoded numbers.
function restore(differences) {
  const numbers = new Float64Array(differences.length);
  let now = 0;
  for (let i = 0; i < differences.length; i++) numbers[i] = now += differences[i];
  return numbers;
}

// The last index whose number is not above `wanted`; -1 if all are above.
function placeOf(numbers, wanted) {
  let low = 0, high = numbers.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (numbers[middle] <= wanted) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

const bounded = (value, low, high) => Math.min(Math.max(value, low), high);
