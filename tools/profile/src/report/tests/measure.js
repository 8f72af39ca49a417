// Runs in a copy of the page under test and leaves what it saw in it. QUIET is replaced by the inks of grid and axes.
const quiet = QUIET;
const within = (box, frame) =>
  box.x >= frame.x - 1 && box.y >= frame.y - 1 &&
  box.x + box.width <= frame.x + frame.width + 1 && box.y + box.height <= frame.y + frame.height + 1;
const drawing = svg => {
  const frame = svg.viewBox.baseVal;
  const shapes = [...svg.querySelectorAll('rect,circle,line,polyline,polygon,path')];
  const inks = shape => [shape.getAttribute('fill'), shape.getAttribute('stroke')].filter(ink => ink && ink !== 'none');
  const marks = shapes.filter(shape => inks(shape).some(ink => !quiet.includes(ink)));
  const drawn = marks.map(mark => mark.getBBox()).filter(box => box.width > 0 || box.height > 0);
  const area = drawn.reduce((area, box) => Math.max(area, Math.max(box.width, 1) * Math.max(box.height, 1)), 0);
  const words = [...svg.querySelectorAll('text')];
  const shown = svg.getBoundingClientRect();
  return {
    id: svg.id,
    marks: drawn.length,
    area,
    outside: drawn.filter(box => !within(box, frame)).length,
    words: words.length,
    cut: words.filter(text => !within(text.getBBox(), frame)).map(text => text.textContent.trim()),
    ink: words.length ? getComputedStyle(words[0]).fill : '',
    named: document.getElementById(svg.getAttribute('aria-labelledby')) !== null,
    width: shown.width,
    height: shown.height,
  };
};
// Wide tables scroll in a frame of their own; nothing else may be wider than the page.
const tooWide = width => {
  document.documentElement.style.width = width + 'px';
  const all = [...document.body.querySelectorAll('*')].filter(element => !element.closest('.scroll table, svg *'));
  const over = all.filter(element => element.getBoundingClientRect().right > width + 1);
  document.documentElement.style.width = '';
  return over.map(element => element.tagName + '.' + element.className);
};
const seen = {
  figures: [...document.querySelectorAll('figure')].map(figure => ({
    id: figure.id,
    caption: figure.querySelector('figcaption').textContent.length,
    drawings: [...figure.querySelectorAll('.panel svg')].map(drawing),
  })),
  ids: [...document.querySelectorAll('[id]')].map(element => element.id),
  links: [...document.querySelectorAll('a')].map(link => link.getAttribute('href')),
  foreign: document.querySelectorAll('img,iframe,object,embed,link,audio,video,form,script:not(#measure)').length,
  requests: performance.getEntriesByType('resource').map(entry => entry.name),
  tooWide: tooWide(360).concat(tooWide(1100)),
  changed: window.changed === undefined ? '' : String(window.changed),
};
const out = document.createElement('pre');
out.id = 'seen';
out.textContent = JSON.stringify(seen);
document.body.append(out);
