// Draws the report from the JSON in #run. Texts only ever become text nodes.
'use strict';
(() => {
  const run = JSON.parse(document.getElementById('run').textContent);
  const page = document.getElementById('page');
  const COLORS = [
    '#0072b2', '#d55e00', '#009e73', '#cc79a7', '#56b4e9', '#e69f00', '#5f6b7a',
  ];
  const color = (i) => COLORS[i % COLORS.length];

  function make(tag, attributes, ...children) {
    const node = document.createElement(tag);
    for (const [key, value] of Object.entries(attributes || {})) {
      if (key === 'class') node.className = value;
      else if (key === 'style') Object.assign(node.style, value);
      else if (key.startsWith('on')) node.addEventListener(key.slice(2), value);
      else node.setAttribute(key, value);
    }
    node.append(...children.filter((c) => c !== null && c !== undefined));
    return node;
  }

  const isNumber = (x) => typeof x === 'number';
  const show = (x, digits = 3) =>
    isNumber(x) ? String(Number(x.toPrecision(digits))) : '–';
  const signed = (x) => (isNumber(x) ? (x > 0 ? '+' : '') + show(x) : '–');
  const percent = (x) => (isNumber(x) ? `${(100 * x).toFixed(0)}%` : '–');

  // ---- head and overview ----

  function header() {
    return make(
      'header', {}, make('h1', {}, run.name),
      make('div', { class: 'facts' },
        ...run.facts.map(([what, value]) =>
          make('span', {}, `${what} `, make('b', {}, value)))),
    );
  }

  function navigation(ids) {
    return make('nav', {}, make('div', {},
      ...ids.map(([id, title]) => make('a', { href: `#${id}` }, title))));
  }

  function verdicts() {
    return make('ul', { class: 'verdicts' },
      ...run.verdicts.map((v) => make('li', { class: v.mood }, v.text,
        v.advice ? make('span', { class: 'advice' }, ` ${v.advice}`) : null)));
  }

  function change(found) {
    if (!found) return '–';
    const mood = found.good > 0 ? 'good' : found.good < 0 ? 'bad' : '';
    return make('span', {}, `${found.text} `,
      make('span', { class: mood }, found.mark));
  }

  function rewardTable() {
    const cells = (row) => [
      make('td', {},
        make('i', { class: 'dot', style: { background: color(row.color) } }),
        row.name),
      make('td', { class: 'number' }, change(row.training)),
      make('td', { class: 'number' }, change(row.held)),
      make('td', { class: 'number' }, show(row.weight)),
      make('td', { class: 'number' }, percent(row.share)),
      make('td', { class: 'number' }, percent(row.missing)),
    ];
    const titles = ['reward', 'training', 'held-out', 'weight', 'share', 'missing'];
    return make('div', { class: 'scroll' }, make('table', {},
      make('thead', {}, make('tr', {}, ...titles.map((t, i) =>
        make('th', i ? { class: 'number' } : {}, t)))),
      make('tbody', {}, ...run.rewards.map((row) =>
        make('tr', {}, ...cells(row))))));
  }

  function overview() {
    const log = run.log.length
      ? make('details', {},
          make('summary', {}, `Log of the rules (${run.log.length})`),
          make('ul', { class: 'log' }, ...run.log.map((e) =>
            make('li', {}, `step ${e.step}, ${e.kind}: ${e.text} ${e.advice}`))))
      : null;
    return make('section', { id: 'overview' },
      make('h2', {}, 'What happened'),
      make('div', { class: 'grid' },
        make('div', { class: 'card' }, verdicts(), log),
        make('div', { class: 'card' }, rewardTable(),
          make('p', {}, 'First against last steps; ▲ ▼ beyond chance, – not.'))));
  }

  // ---- charts ----

  const FONT = { family: 'system-ui, sans-serif', size: 12, color: '#1c2430' };
  const AXIS = {
    gridcolor: '#edf0f4', zerolinecolor: '#d3d9e1', linecolor: '#c6ccd5',
    automargin: true,
  };

  function layoutOf(card) {
    const { hints } = card;
    const given = card.layout;
    const layout = {
      font: FONT,
      margin: { l: 48, r: 14, t: 8, b: 40 },
      height: hints.height || 290,
      paper_bgcolor: 'rgba(0,0,0,0)',
      plot_bgcolor: 'rgba(0,0,0,0)',
      hovermode: 'x unified',
      hoverlabel: { font: { size: 12 } },
      legend: { orientation: 'h', y: 1.02, yanchor: 'bottom', x: 0 },
      shapes: [],
      ...given,
      xaxis: { ...AXIS, zeroline: false, ...(hints.plain ? {} : { title: { text: 'step' } }),
        ...given.xaxis },
      yaxis: { ...AXIS, ...given.yaxis },
    };
    const across = { type: 'line', xref: 'paper', x0: 0, x1: 1 };
    if (hints.zero) {
      layout.shapes.push({ ...across, y0: 0, y1: 0,
        line: { color: '#9aa3af', width: 1 } });
    }
    for (const level of hints.levels || []) {
      layout.shapes.push({ ...across, y0: level, y1: level,
        line: { color: '#b3261e', width: 1, dash: 'dot' } });
    }
    for (const [low, high] of hints.bands || []) {
      layout.shapes.push({ type: 'rect', xref: 'paper', x0: 0, x1: 1, y0: low,
        y1: high, fillcolor: 'rgba(0,128,90,0.09)', line: { width: 0 },
        layer: 'below' });
    }
    if (!hints.plain) {
      const steps = [...new Set(run.events.map((e) => e.step))].slice(0, 12);
      for (const step of steps) {
        layout.shapes.push({ type: 'line', yref: 'paper', y0: 0, y1: 1,
          x0: step, x1: step, layer: 'below',
          line: { color: 'rgba(179,38,30,0.35)', width: 1, dash: 'dash' } });
      }
    }
    return layout;
  }

  const CONFIG = { responsive: true, displaylogo: false, displayModeBar: false };

  // A chart is drawn when it comes near the screen: the page opens at once.
  const pending = new Map();
  const draw = (node) => {
    const card = pending.get(node);
    if (!card) return;
    pending.delete(node);
    Plotly.newPlot(node, card.data, layoutOf(card), CONFIG);
  };
  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting) draw(entry.target);
  }, { rootMargin: '400px' });
  window.addEventListener('beforeprint', () => {
    [...pending.keys()].forEach(draw);
  });

  function cards(section) {
    return make('section', { id: section.id },
      make('h2', {}, section.title),
      make('div', { class: 'grid' }, ...section.cards.map((card) => {
        const plot = make('div', { class: 'plot',
          style: { minHeight: `${card.hints.height || 290}px` } });
        pending.set(plot, card);
        watcher.observe(plot);
        return make('div', { class: 'card' }, make('h3', {}, card.title),
          make('p', {}, card.caption), plot);
      })));
  }

  // ---- the row inspector ----

  function promptNodes(prompt) {
    if (typeof prompt === 'string') return [prompt];
    return prompt.flatMap((message, i) => [
      ...(i ? ['\n\n'] : []),
      make('span', { class: 'role' }, `${message.role}: `),
      message.content,
    ]);
  }

  function bar(value, scale, tint) {
    const node = make('div', { class: 'bar' });
    if (isNumber(value) && scale > 0) {
      const width = 50 * Math.min(1, Math.abs(value) / scale);
      node.append(make('i', { style: {
        background: tint, width: `${width}%`,
        left: `${value < 0 ? 50 - width : 50}%`,
      } }));
    }
    return node;
  }

  function why(row) {
    const parts = run.names
      .filter((n) => isNumber(row.weighted?.[n]) && row.weighted[n] !== 0)
      .sort((a, b) => Math.abs(row.weighted[b]) - Math.abs(row.weighted[a]))
      .map((n) => `${n} ${row.weighted[n] > 0 ? 'raises' : 'lowers'} it by ` +
        show(Math.abs(row.weighted[n])));
    const dropped = run.names.filter((n) =>
      isNumber(row.rewards[n]) && isNumber(row.shaped?.[n]) &&
      row.shaped[n] !== row.rewards[n]);
    const silent = run.names.filter((n) =>
      row.weighted?.[n] === 0 && !dropped.includes(n));
    const absent = run.names.filter((n) => !isNumber(row.rewards[n]));
    let text = parts.length
      ? `Against the other answers to this prompt, ${parts.join('; ')}.`
      : 'No reward tells this answer from the others to this prompt.';
    if (silent.length && parts.length) {
      text += ` ${silent.join(', ')}: at the mean of the group, adds nothing.`;
    }
    if (dropped.length) {
      text += ` ${dropped.join(', ')} does not count here: the condition failed.`;
    }
    if (absent.length) text += ` ${absent.join(', ')} gave no value.`;
    if (row.counted === false) text += ' The row was left out of the loss.';
    return text;
  }

  function pathTable(row) {
    const full = row.weighted !== undefined;
    const scale = Math.max(1e-9,
      ...run.names.map((n) => Math.abs(row.weighted?.[n] || 0)),
      Math.abs(row.combined || 0), Math.abs(row.advantage || 0));
    const number = (x) => make('td', { class: 'number' }, x);
    const titles = full
      ? ['', 'raw', 'shaped', 'normalized', 'weighted', null]
      : ['', 'raw'];
    const body = run.names.map((name, i) => make('tr', {},
      make('td', {},
        make('i', { class: 'dot', style: { background: color(i) } }), name),
      number(show(row.rewards[name])),
      ...(full
        ? [number(show(row.shaped[name])), number(signed(row.normalized[name])),
           number(signed(row.weighted[name])),
           make('td', { class: 'bars' }, bar(row.weighted[name], scale, color(i)))]
        : [])));
    if (full) {
      body.push(make('tr', { class: 'sum' }, make('td', {}, 'sum'), number(''),
        number(''), number(''), number(signed(row.combined)),
        make('td', { class: 'bars' }, bar(row.combined, scale, '#5f6b7a'))));
    }
    body.push(make('tr', { class: 'sum' }, make('td', {}, 'advantage'),
      ...(full ? [number(''), number(''), number('')] : []),
      number(signed(row.advantage)),
      ...(full
        ? [make('td', { class: 'bars' }, bar(row.advantage, scale, '#1c2430'))] : [])));
    return make('div', { class: 'scroll' }, make('table', {},
      make('thead', {}, make('tr', {}, ...titles.map((t, i) =>
        make('th', { class: t === null ? 'bars' : i ? 'number' : '' }, t)))),
      make('tbody', {}, ...body)));
  }

  function detail(row) {
    const failures = Object.entries(row.failures || {});
    return make('div', {},
      make('div', { class: 'label' },
        `step ${row.step}, row ${row.row}` +
        (isNumber(row.group) ? `, prompt ${row.group}` : '')),
      make('p', { class: 'why' }, why(row)),
      pathTable(row),
      ...failures.map(([name, text]) =>
        make('p', { class: 'bad' }, `${name}: ${text}`)),
      make('div', { class: 'label', style: { marginTop: '14px' } }, 'prompt'),
      make('div', { class: 'text' }, ...promptNodes(row.prompt)),
      make('div', { class: 'label' },
        'completion' + (isNumber(row.tokens) ? `, ${row.tokens} tokens` : '') +
        (row.ended === false ? ', cut off' : '')),
      make('div', { class: 'text' }, row.completion));
  }

  function inspector() {
    const steps = [...new Set(run.samples.map((r) => r.step))];
    const choice = make('select', { 'aria-label': 'step' },
      ...steps.map((s) => make('option', { value: s }, `step ${s}`)));
    choice.value = steps[steps.length - 1];
    const list = make('div', { class: 'card rows' });
    const shown = make('div', { class: 'card', id: 'detail' });
    let rows = [];
    let chosen = 0;

    function choose(index) {
      chosen = Math.max(0, Math.min(rows.length - 1, index));
      shown.replaceChildren(detail(rows[chosen]));
      [...list.querySelectorAll('tbody tr')].forEach((node, i) => {
        node.classList.toggle('chosen', i === chosen);
      });
    }

    function fill() {
      rows = run.samples.filter((r) => r.step === Number(choice.value));
      const first = (i) => i && rows[i].group !== rows[i - 1].group;
      list.replaceChildren(make('table', {},
        make('thead', {}, make('tr', {},
          make('th', {}, 'row'), make('th', { class: 'number' }, 'tokens'),
          ...run.names.map((n) => make('th', { class: 'number' }, n)),
          make('th', { class: 'number' }, 'advantage'))),
        make('tbody', {}, ...rows.map((row, i) => make('tr', {
          class: first(i) ? 'first' : '', tabindex: 0,
          onclick: () => choose(i),
          onkeydown: (event) => {
            if (event.key === 'Enter') choose(i);
          },
        },
          make('td', {}, String(row.row)),
          make('td', { class: 'number' }, show(row.tokens, 6)),
          ...run.names.map((n) =>
            make('td', { class: 'number' }, show(row.rewards[n]))),
          make('td', { class: 'number ' +
            (row.advantage > 0 ? 'good' : row.advantage < 0 ? 'bad' : '') },
            signed(row.advantage)))))));
      choose(0);
    }
    choice.addEventListener('change', fill);
    const section = make('section', { id: 'inspector' },
      make('h2', {}, 'Why did this row get this advantage?'),
      make('div', { class: 'controls' }, choice,
        make('button', { onclick: () => choose(chosen - 1) }, '‹ row'),
        make('button', { onclick: () => choose(chosen + 1) }, 'row ›'),
        make('span', { class: 'label' },
          'Lines separate the groups: answers to one prompt.')),
      make('div', { class: 'inspector' }, list, shown));
    fill();
    return section;
  }

  // ---- the page ----

  const ids = [['overview', 'What happened']];
  const parts = [overview()];
  for (const section of run.sections) {
    ids.push([section.id, section.title]);
    parts.push(cards(section));
    if (section.id === 'advantage' && run.samples.length) {
      ids.push(['inspector', 'Rows']);
      parts.push(inspector());
    }
  }
  page.append(header(), navigation(ids), ...parts);
  document.body.append(make('footer', {},
    'Every metric is defined in experiments/METRICS.md of gdpo_jax. ' +
    'Dashed red lines: steps at which a rule raised an alarm.'));
})();
