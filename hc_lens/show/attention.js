"use strict";
// Unpacks the patterns of each figure of the page and hands them to circuitsvis once the figure comes
// into view: a map has a cell for each pair of tokens, and drawing a whole page of them at once takes
// seconds. In a notebook circuitsvis comes with another output. Until that one has run, or if it is
// gone, the maps are drawn plainly here.
var hcLensFigure = function (place) {
  const data = JSON.parse(place.dataset.figure);
  const unpack = function () {
    const bytes = atob(data.values);
    const size = data.tokens.length;
    let offset = 0;
    const next = function () {
      const whole = bytes.charCodeAt(offset) + 256 * bytes.charCodeAt(offset + 1);
      offset += 2;
      return Math.round((whole / 65535) * 1e4) / 1e4;
    };
    const row = () => Array.from({ length: size }, next);
    return data.heads.map(() => Array.from({ length: size }, row));
  };
  const drawPlainly = function () {
    const side = Math.max(2, Math.min(16, Math.floor(240 / data.tokens.length)));
    const note = document.createElement("p");
    note.textContent =
      "Plain maps, queries down and keys across: the output that brings the interactive view, that " +
      "of the first figure, is not on this page. Run that cell again (after a restart of the " +
      "kernel any figure brings it), or write a page of its own with .save('figure.html').";
    place.append(note);
    unpack().forEach(function (map, head) {
      const box = document.createElement("figure");
      const title = document.createElement("figcaption");
      const canvas = document.createElement("canvas");
      title.textContent = data.heads[head];
      canvas.width = canvas.height = side * data.tokens.length;
      const pen = canvas.getContext("2d");
      map.forEach((row, query) =>
        row.forEach(function (value, key) {
          pen.fillStyle = `rgba(0, 0, 255, ${value})`;
          pen.fillRect(key * side, query * side, side, side);
        })
      );
      box.append(title, canvas);
      place.append(box);
    });
  };
  let drawn = "";
  const draw = function () {
    const way = window.CircuitsVis ? "circuitsvis" : "plainly";
    if (!place.isConnected || drawn === "circuitsvis" || drawn === way) return;
    drawn = way;
    place.replaceChildren();
    if (way === "plainly") {
      drawPlainly();
      return;
    }
    CircuitsVis.render(place.id, CircuitsVis.AttentionHeads, {
      tokens: data.tokens,
      attention: unpack(),
      attentionHeadNames: data.heads,
      maxValue: 1,
      minValue: -1,
      maskUpperTri: data.causal,
    });
  };
  const near = { rootMargin: "300px" };
  const observer = new IntersectionObserver(function (entries) {
    if (entries.some((entry) => entry.isIntersecting)) {
      observer.disconnect();
      draw();
    }
  }, near);
  observer.observe(place);
  window.addEventListener("beforeprint", draw);
  window.addEventListener("hc-lens-bundle", () => drawn && draw());
};
{
  // Each output of a notebook brings this script, and begins the figures that no other has begun.
  const begin = function () {
    for (const place of document.querySelectorAll(".hc-lens-canvas[data-figure]")) {
      if (!place.hcLensBegun) hcLensFigure(place);
      place.hcLensBegun = true;
    }
  };
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", begin);
  else begin();
}
