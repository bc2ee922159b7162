"use strict";
// Unpacks the patterns of one figure and hands them to circuitsvis once the figure comes into view:
// a map has a cell for each pair of tokens, and drawing a whole page of them at once takes seconds.
var hcLensAttention = function (id, data) {
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
  let drawn = false;
  const draw = function () {
    if (drawn) return;
    drawn = true;
    CircuitsVis.render(id, CircuitsVis.AttentionHeads, {
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
  observer.observe(document.getElementById(id));
  window.addEventListener("beforeprint", draw);
};
