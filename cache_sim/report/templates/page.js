addEventListener("beforeprint", function () {
  document.querySelectorAll("details").forEach(function (part) { part.open = true; });
});
document.querySelectorAll("[data-filter]").forEach(function (input) {
  var rows = document.querySelectorAll(input.dataset.filter);
  var shown = document.getElementById("shown");
  function apply() {
    var words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    var count = 0;
    rows.forEach(function (row) {
      var text = row.textContent.toLowerCase();
      row.hidden = !words.every(function (word) { return text.includes(word); });
      if (!row.hidden) count += 1;
    });
    if (words.length > 0) document.getElementById("all").open = true;
    shown.textContent = words.length === 0 ? "" : count + " of " + rows.length;
  }
  input.addEventListener("input", apply);
  input.closest(".filter").hidden = false;
  apply();
});
// A box of the legend takes its curve out of the pictures above it.
document.querySelectorAll(".curves input").forEach(function (box) {
  box.addEventListener("change", function () {
    box.closest(".curves").querySelectorAll('g[data-part="' + box.dataset.part + '"]').forEach(
      function (part) { part.style.display = box.checked ? "" : "none"; });
  });
});
// What a finding is about is inside the visible part of its picture, however narrow the window is.
document.querySelectorAll(".scroll, .chart").forEach(function (room) {
  var part = room.querySelector("svg .guilty, svg line.wrong");
  if (!part) return;
  var box = part.getBoundingClientRect(), around = room.getBoundingClientRect();
  room.scrollLeft += (box.left + box.right - around.left - around.right) / 2;
});
