"use strict";
// Draws the lanes: one row per slice, time from left to right. The data comes from lane_data.py, times in ticks.
// `view` ({from, to} in seconds) is what to show first; returns what is shown, and how to stop. Null: no lanes here.
function drawLanes(view) {
  const canvas = document.getElementById("lane-canvas");
  if (!canvas) return null;
  const data = JSON.parse(document.getElementById("lane-data").textContent);
  const axis = document.getElementById("lane-axis");
  const tip = document.getElementById("lane-tip");
  const range = document.getElementById("lane-range");
  const lanes = data.pools.flatMap((pool) => pool.lanes.map((lane, index) => ({ ...lane, pool: pool.name, first: index === 0 })));
  const LEFT = 132, RIGHT = 8, AXIS = 36, HEAD = 20, GAP = lanes.length > 60 ? 1 : 4;
  const ROW = lanes.length <= 12 ? 40 : lanes.length <= 40 ? 24 : lanes.length <= 160 ? 13 : 7;
  const TAG = ROW >= 24 ? 4 : ROW >= 13 ? 2 : 0;
  const SYNC = data.categories.findIndex((category) => category.style === "c-sync");
  const dim = new Set();
  const whole = Math.max(1, data.span);
  let from = 0, to = whole, drag = null, colours = {}, width = 0;

  let top = 0;
  for (const lane of lanes) {
    if (lane.first) top += HEAD;
    lane.top = top;
    top += ROW + GAP;
    lane.peak = lane.load[1].reduce((most, level) => Math.max(most, level), 1);
  }
  const height = top;
  const peak = lanes.reduce((most, lane) => Math.max(most, lane.peak), 1);

  const x = (tick) => LEFT + ((tick - from) / (to - from)) * (width - LEFT - RIGHT);
  const tickAt = (px) => from + ((px - LEFT) / (width - LEFT - RIGHT)) * (to - from);
  const clamp = (value, low, high) => Math.min(high, Math.max(low, value));

  function readColours() {
    const style = getComputedStyle(document.documentElement);
    const get = (name) => style.getPropertyValue(name).trim();
    colours = { ink: get("--ink"), soft: get("--soft"), rule: get("--rule"), band: get("--band"), accent: get("--accent"),
      paper: get("--paper"), tags: [get("--wait-data"), get("--tag-train"), get("--tag-rollout")] };
    colours.of = data.categories.map((category) => get("--" + category.style.slice(2)));
  }

  function prepare(target, cssHeight) {
    const scale = window.devicePixelRatio || 1;
    const pixels = Math.round(width * scale), rows = Math.round(cssHeight * scale);
    if (target.width !== pixels || target.height !== rows) {
      target.width = pixels;
      target.height = rows;
      target.style.height = cssHeight + "px";
      target.style.width = width + "px"; // a scrollbar takes from the lanes only
    }
    const pen = target.getContext("2d");
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.clearRect(0, 0, width, cssHeight);
    return pen;
  }

  // First index whose value is above the limit.
  function above(values, limit) {
    let low = 0, high = values.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (values[middle] <= limit) low = middle + 1; else high = middle;
    }
    return low;
  }

  function seconds(value) {
    const size = Math.abs(value);
    if (size < 1) return (value * 1000).toFixed(size < 0.01 ? 1 : 0) + " ms";
    if (size < 60) return value.toFixed(size < 10 ? 2 : 1).replace(/\.?0+$/, "") + " s";
    const minutes = Math.floor(Math.round(size) / 60), rest = Math.round(size) % 60;
    if (minutes < 60) return minutes + ":" + String(rest).padStart(2, "0") + " min";
    return Math.floor(minutes / 60) + ":" + String(minutes % 60).padStart(2, "0") + " h";
  }

  function draw() {
    width = canvas.parentElement.clientWidth;
    const pen = prepare(canvas, height);
    drawBands(pen);
    pen.font = "12px system-ui, sans-serif";
    for (const lane of lanes) {
      if (lane.first) {
        pen.fillStyle = colours.soft;
        pen.font = "600 12px system-ui, sans-serif";
        pen.fillText("pool " + lane.pool, 0, lane.top - 6);
        pen.font = "12px system-ui, sans-serif";
      }
      if (ROW >= 13) {
        pen.fillStyle = colours.ink;
        const label = lane.devices > 1 ? lane.name + "  ×" + lane.devices : lane.name;
        pen.fillText(fit(pen, label, LEFT - 12), 0, lane.top + TAG + (ROW - TAG) / 2 + 4);
      }
      pen.save();
      pen.beginPath();
      pen.rect(LEFT, lane.top, width - LEFT - RIGHT, ROW);
      pen.clip();
      drawStretches(pen, lane);
      pen.restore();
    }
    drawMarks(pen);
    if (drag && drag.to !== undefined) {
      pen.fillStyle = colours.accent;
      pen.globalAlpha = 0.18;
      pen.fillRect(Math.min(drag.from, drag.to), 0, Math.abs(drag.to - drag.from), height);
      pen.globalAlpha = 1;
    }
    drawAxis();
    range.textContent = to - from >= whole ? "everything: " + seconds(whole * data.tick_s)
      : seconds(from * data.tick_s) + " to " + seconds(to * data.tick_s) + " (" + seconds((to - from) * data.tick_s) + ")";
  }

  function fit(pen, text, most) {
    if (pen.measureText(text).width <= most) return text;
    let shown = text;
    while (shown.length > 1 && pen.measureText(shown + "…").width > most) shown = shown.slice(0, -1);
    return shown + "…";
  }

  function drawBands(pen) {
    pen.fillStyle = colours.band;
    data.steps.forEach(([, start, stop], index) => {
      if (index % 2 || stop < from || start > to) return;
      const left = Math.max(LEFT, x(start));
      pen.fillRect(left, 0, Math.min(width - RIGHT, x(stop)) - left, height);
    });
  }

  // Stretches narrower than a pixel share it: the category with most of its time is painted.
  function drawStretches(pen, lane) {
    const shaded = ROW >= 22;
    let pixel = -1, weights = null;
    const flush = () => {
      if (weights === null) return;
      let best = null;
      for (const [key, weight] of weights) if (best === null || weight > best[1]) best = [key, weight];
      paint(pen, lane, pixel, pixel + 1, best[0] >> 2, best[0] & 3, shaded);
      weights = null;
    };
    for (let index = above(lane.stop, from); index < lane.start.length && lane.start[index] < to; index++) {
      const left = x(lane.start[index]), right = x(lane.stop[index]);
      const category = lane.category[index], tag = lane.tag[index];
      if (right - left >= 1) {
        flush();
        paint(pen, lane, left, right, category, tag, shaded);
        continue;
      }
      if (Math.floor(left) !== pixel) flush();
      pixel = Math.floor(left);
      weights = weights || new Map();
      const key = (category << 2) | tag;
      weights.set(key, (weights.get(key) || 0) + right - left);
    }
    flush();
  }

  function paint(pen, lane, left, right, category, tag, shaded) {
    const body = lane.top + TAG + (TAG ? 1 : 0), tall = ROW - TAG - (TAG ? 1 : 0);
    if (TAG) {
      pen.fillStyle = colours.tags[tag];
      pen.fillRect(left, lane.top, right - left, TAG);
    }
    const generating = data.categories[category].style === "c-generate" || data.categories[category].style === "c-prefill-again";
    pen.fillStyle = colours.of[category];
    pen.globalAlpha = (dim.has(category) ? 0.12 : 1) * (generating && shaded && lane.load[0].length ? 0.35 : 1);
    pen.fillRect(left, body, right - left, tall);
    pen.globalAlpha = dim.has(category) ? 0.12 : 1;
    if (generating && shaded) drawLoad(pen, lane, Math.max(LEFT, left), Math.min(width - RIGHT, right), body, tall);
    pen.globalAlpha = 1;
  }

  function drawLoad(pen, lane, left, right, body, tall) {
    const [times, levels] = lane.load;
    let index = Math.max(0, above(times, tickAt(left)) - 1);
    for (let px = left; px < right; px += 1) {
      const end = tickAt(px + 1);
      let level = times[index] <= end ? levels[index] : 0;
      while (index + 1 < times.length && times[index + 1] <= end) {
        index += 1;
        level = Math.max(level, levels[index]);
      }
      const part = (level / peak) * tall;
      pen.fillRect(px, body + tall - part, Math.min(1, right - px), part);
    }
  }

  function drawMarks(pen) {
    const acted = data.decisions.filter(([at, action]) => from <= at && at <= to && action !== "hold" && action !== "wait");
    pen.fillStyle = colours.ink;
    pen.globalAlpha = acted.length > 40 ? 0.15 : 0.5;
    for (const [at] of acted) pen.fillRect(x(at), 0, 1, height);
    pen.globalAlpha = 1;
  }

  function drawAxis() {
    const pen = prepare(axis, AXIS);
    pen.font = "11px system-ui, sans-serif";
    pen.textAlign = "center";
    let last = -Infinity;
    for (const [step, start, stop] of data.steps) {
      const left = Math.max(LEFT, x(start)), right = Math.min(width - RIGHT, x(stop));
      if (right <= left) continue;
      const label = right - left > 52 ? "step " + step : String(step);
      const middle = (left + right) / 2, half = pen.measureText(label).width / 2;
      if (middle - half < last + 6) continue;
      last = middle + half;
      pen.fillStyle = colours.ink;
      pen.fillText(label, middle, 11);
    }
    const rough = ((to - from) * data.tick_s) / Math.max(2, (width - LEFT) / 110);
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = rough < 20 ? [1, 2, 5, 10].find((f) => f * power >= rough) * power
      : [30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 43200, 86400].find((s) => s >= rough) || 86400 * Math.ceil(rough / 86400);
    pen.fillStyle = colours.soft;
    for (let at = Math.ceil((from * data.tick_s) / step) * step; at <= to * data.tick_s + 1e-9; at += step) {
      const px = x(at / data.tick_s);
      pen.fillRect(px, AXIS - 4, 1, 4);
      pen.fillText(at === 0 ? "0" : seconds(at), clamp(px, LEFT + 4, width - RIGHT - 16), AXIS - 9);
    }
    pen.textAlign = "left";
    for (const [at] of data.versions) {
      if (at < from || at > to) continue;
      const px = x(at);
      pen.fillStyle = colours.of[SYNC];
      pen.beginPath();
      pen.moveTo(px - 4, AXIS - 7);
      pen.lineTo(px + 4, AXIS - 7);
      pen.lineTo(px, AXIS);
      pen.fill();
    }
  }

  function show(start, stop) {
    const least = Math.max(10, whole / 20000);
    const length = clamp(stop - start, least, whole);
    from = clamp(start, 0, whole - length);
    to = from + length;
    draw();
  }
  const zoom = (factor, at) => show(at - (at - from) * factor, at + (to - at) * factor);
  const move = (share) => show(from + (to - from) * share, to + (to - from) * share);

  function laneAt(py) {
    return lanes.find((lane) => py >= lane.top && py < lane.top + ROW);
  }

  function describe(px, py) {
    const lane = laneAt(py), tick = tickAt(px);
    if (!lane || px < LEFT || px > width - RIGHT) return null;
    const index = above(lane.stop, tick);
    const inside = index < lane.start.length && lane.start[index] <= tick;
    const lines = [lane.name + " · " + seconds(tick * data.tick_s)];
    if (inside) {
      lines.push(data.categories[lane.category[index]].label + " for " + seconds((lane.stop[index] - lane.start[index]) * data.tick_s));
      lines.push("state " + lane.state[index]);
    } else {
      lines.push("not there at this time");
    }
    const point = above(lane.load[0], tick) - 1;
    if (point >= 0 && lane.load[1][point] > 0) lines.push(lane.load[1][point] + " requests");
    const step = data.steps.find(([, start, stop]) => start <= tick && tick < stop);
    if (step) lines.push("step " + step[0]);
    const reach = (3 / (width - LEFT - RIGHT)) * (to - from);
    for (const [at, action, slices, reason] of data.decisions) {
      if (Math.abs(at - tick) <= reach) lines.push(action + " " + slices + ": " + reason);
    }
    return lines.slice(0, 8).join("\n");
  }

  function hover(event) {
    const box = canvas.getBoundingClientRect();
    const px = event.clientX - box.left, py = event.clientY - box.top;
    if (drag) {
      drag.to = clamp(px, LEFT, width - RIGHT);
      draw();
    }
    const text = describe(px, py);
    tip.hidden = text === null;
    if (text === null) return;
    tip.textContent = text;
    const outer = canvas.closest(".lanes").getBoundingClientRect();
    tip.style.left = clamp(event.clientX - outer.left + 14, 0, outer.width - tip.offsetWidth) + "px";
    tip.style.top = event.clientY - outer.top + 16 + "px";
  }

  canvas.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    canvas.setPointerCapture(event.pointerId);
    drag = { from: clamp(event.clientX - canvas.getBoundingClientRect().left, LEFT, width - RIGHT) };
  });
  canvas.addEventListener("pointermove", hover);
  canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
  canvas.addEventListener("pointerup", () => {
    const chosen = drag;
    drag = null;
    if (!chosen || chosen.to === undefined || Math.abs(chosen.to - chosen.from) < 4) return draw();
    const ends = [tickAt(chosen.from), tickAt(chosen.to)].sort((a, b) => a - b);
    return show(ends[0], ends[1]);
  });
  canvas.addEventListener("dblclick", () => show(0, whole));
  canvas.addEventListener("wheel", (event) => {
    const sideways = event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY);
    if (!event.ctrlKey && !event.metaKey && !sideways) return;
    event.preventDefault();
    const amount = event.deltaX || event.deltaY;
    if (sideways) move(clamp(amount / 600, -0.5, 0.5));
    else zoom(event.deltaY > 0 ? 1.25 : 0.8, tickAt(event.clientX - canvas.getBoundingClientRect().left));
  }, { passive: false });
  canvas.addEventListener("keydown", (event) => {
    const actions = { "+": () => zoom(0.6, (from + to) / 2), "=": () => zoom(0.6, (from + to) / 2),
      "-": () => zoom(1.6, (from + to) / 2), ArrowLeft: () => move(-0.25), ArrowRight: () => move(0.25), 0: () => show(0, whole) };
    if (!actions[event.key]) return;
    event.preventDefault();
    actions[event.key]();
  });
  const press = (id, action) => document.getElementById(id).addEventListener("click", action);
  press("lane-in", () => zoom(0.6, (from + to) / 2));
  press("lane-out", () => zoom(1.6, (from + to) / 2));
  press("lane-left", () => move(-0.4));
  press("lane-right", () => move(0.4));
  press("lane-all", () => show(0, whole));

  const used = new Set(lanes.flatMap((lane) => lane.category));
  const legend = document.getElementById("lane-legend");
  data.categories.forEach((category, index) => {
    if (!used.has(index)) return;
    const entry = document.createElement("span");
    const key = document.createElement("i");
    key.className = "key " + category.style;
    entry.append(key, category.label);
    entry.title = "click to fade or show";
    entry.addEventListener("click", () => {
      if (!dim.delete(index)) dim.add(index);
      entry.classList.toggle("off", dim.has(index));
      draw();
    });
    legend.append(entry);
  });
  if (data.grain_s > 0) {
    const note = document.createElement("span");
    note.textContent = "stretches below " + seconds(data.grain_s) + " are joined";
    legend.append(note);
  }

  readColours();
  const over = new AbortController(), resized = new ResizeObserver(draw);
  window.matchMedia("(prefers-color-scheme: dark)")
    .addEventListener("change", () => { readColours(); draw(); }, { signal: over.signal });
  resized.observe(canvas.parentElement);
  if (view) show(view.from / data.tick_s, view.to / data.tick_s); else draw();
  return {
    view: () => (to - from >= whole ? undefined : { from: from * data.tick_s, to: to * data.tick_s }),
    stop: () => { over.abort(); resized.disconnect(); },
  };
}
drawLanes();
