// Sets up the parts of the page.

function followTheme() {
  const button = byId("theme"), root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme || (system.matches ? "dark" : "light")) === "dark";
  const say = () => {
    button.textContent = isDark() ? "Light" : "Dark";
    button.setAttribute("aria-label", `Switch to ${isDark() ? "light" : "dark"} colours`);
  };
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    say();
  });
  system.addEventListener("change", say);
  button.hidden = false;
  say();
}

function chooseWindow(timeline, chart) {
  const select = byId("window");
  const choices = [["the whole", chart.whole],
    ...timeline.data.phases.map(([name, start, stop]) => [name, [start, stop]])];
  choices.forEach(([name], i) => select.append(make("option", { value: i }, name)));
  select.addEventListener("change", () => chart.show(choices[Number(select.value)][1]));
  byId("zoom-in").addEventListener("click", () => chart.zoom(0.5));
  byId("zoom-out").addEventListener("click", () => chart.zoom(2));
}

function start() {
  followTheme();
  const data = read("memory-data");
  if (!data.events) return;
  document.querySelectorAll(".controls").forEach((one) => { one.hidden = false; });
  const timeline = readTimeline(data);
  const chart = makeChart(timeline, (place) => {
    showAlive(timeline, place);
    treemap.show(timeline.events[place]);
    table.momentChanged();
  });
  const treemap = makeTreemap(timeline);
  const table = makeTable(timeline, chart);
  showPhases(timeline);
  chooseWindow(timeline, chart);
  const toPeak = () => chart.choose(timeline.sampleAt(data.peak));
  byId("to-peak").addEventListener("click", toPeak);
  toPeak();
}

start();
