// Draws the dashboard with the libraries that Grafana publishes under Apache-2.0: its panels' components, and its own
// field configuration, units, time ranges and transformations. Grafana's server and its panel plugins are under the
// AGPL and not used, so this page does what they do: variables, queries, default settings of panels, positions.
// window.report has what every panel got, and the problems.
import { createRoot } from 'react-dom/client';
import {
  EventBusSrv, FieldType, PanelPlugin, ThemeContext, applyFieldOverrides, cacheFieldDisplayNames, createTheme,
  dataLinksOverrideProcessor, displayNameOverrideProcessor, getFieldDisplayValues, getPanelOptionsWithDefaults,
  getValueFormats, identityOverrideProcessor, numberOverrideProcessor, rangeUtil, standardFieldConfigEditorRegistry,
  standardTransformers, standardTransformersRegistry, stringOverrideProcessor, thresholdsOverrideProcessor,
  toDataFrame, transformDataFrame, unitOverrideProcessor, valueMappingsOverrideProcessor,
} from '@grafana/data';
import { initPluginTranslations } from '@grafana/i18n';
import {
  BigValue, GlobalStyles, InlineField, Input, PanelChrome, PanelContextProvider, PortalContainer, TimeRangeLabel,
  TimeSeries, VizRepeater,
} from '@grafana/ui';
import { TableNG } from '@grafana/ui/unstable';
import { firstValueFrom } from 'rxjs';

const theme = createTheme({ colors: { mode: 'light' } });
const report = { panels: [], annotations: [], problems: [] };
const problem = (text) => report.problems.push(text);
const units = new Set(getValueFormats().flatMap((group) => group.submenu.map((format) => format.value)));

// The settings that Grafana has for fields of every panel, and for those of each panel type, with their defaults.
const red80 = { mode: 'absolute', steps: [{ value: -Infinity, color: 'green' }, { value: 80, color: 'red' }] };
const setting = (id, process, defaultValue, shouldApply = () => true) => (
  { id, path: id, name: id, process, defaultValue, shouldApply, settings: {} });
standardFieldConfigEditorRegistry.setInit(() => [
  setting('unit', unitOverrideProcessor), setting('min', numberOverrideProcessor),
  setting('max', numberOverrideProcessor), setting('decimals', numberOverrideProcessor),
  setting('displayName', displayNameOverrideProcessor), setting('noValue', stringOverrideProcessor),
  setting('color', identityOverrideProcessor, { mode: 'thresholds' }),
  setting('thresholds', thresholdsOverrideProcessor, red80),
  setting('mappings', valueMappingsOverrideProcessor, []), setting('links', dataLinksOverrideProcessor, []),
]);
standardTransformersRegistry.setInit(() => [...new Set(Object.values(standardTransformers))].map((one) => (
  { id: one.id, name: one.name, transformation: async () => one, editor: () => null })));
const hideFrom = { tooltip: false, viz: false, legend: false };
const custom = {
  stat: {},
  table: { align: 'auto', cellOptions: { type: 'auto' }, inspect: false, width: undefined, hideFrom },
  timeseries: {
    drawStyle: 'line', lineInterpolation: 'linear', lineWidth: 1, fillOpacity: 0, gradientMode: 'none', pointSize: 5,
    showPoints: 'auto', spanNulls: false, stacking: { mode: 'none', group: 'A' }, axisPlacement: 'auto', axisLabel: '',
    axisSoftMin: undefined, axisSoftMax: undefined, axisColorMode: 'text', scaleDistribution: { type: 'linear' },
    thresholdsStyle: { mode: 'off' }, lineStyle: undefined, hideFrom,
  },
};
const plugin = (type) => new PanelPlugin(null).useFieldConfig({
  standardOptions: type === 'timeseries' ? { color: { defaultValue: { mode: 'palette-classic' } } } : {},
  useCustomConfig: (builder) => Object.entries(custom[type]).forEach(([id, value]) => (
    builder.addCustomEditor(setting(id, identityOverrideProcessor, value, (field) => field.type !== FieldType.time)))),
});

async function prometheus(path, parameters) {
  const answer = await (await fetch(`/api/v1/${path}?${new URLSearchParams(parameters)}`)).json();
  if (answer.status !== 'success') throw new Error(`Prometheus refuses ${path} ${parameters.query}: ${answer.error}`);
  return answer.data;
}

// Variables, as Grafana fills them: "All" is a regular expression of all values.
const escaped = (value) => value.replace(/[\\^$*+?.()|[\]{}]/g, '\\\\$&');
async function variables(list) {
  const values = {};
  for (const variable of list) {
    if (variable.type === 'datasource') {
      values[variable.name] = { value: variable.query, text: variable.query };
      continue;
    }
    const [, metric, label] = variable.query.query.match(/^label_values\((\w+), *(\w+)\)$/);
    const found = await prometheus(`label/${label}/values`, { 'match[]': metric });
    if (!found.length) problem(`variable ${variable.name} has no value`);
    const text = variable.current.value === '$__all' ? 'All' : variable.current.text;
    values[variable.name] = { value: found.length > 1 ? `(${found.map(escaped).join('|')})` : escaped(found[0]), text };
  }
  return values;
}
function filled(text, values) {
  return text.replace(/\$(?:(\w+)|\{(\w+)\})/g, (whole, bare, braced) => {
    const of = values[bare ?? braced];
    if (of === undefined) problem(`no variable ${whole} in ${text}`);
    return of?.value ?? of;
  });
}

// Asks a panel's queries, as Grafana's data source for Prometheus does, and makes frames of the answers.
async function frames(panel, values, range, width, scrape) {
  const { intervalMs } = rangeUtil.calculateInterval(range, width, `${scrape}s`);
  const step = intervalMs / 1000;
  const rate = `${Math.max(step + scrape, 4 * scrape)}s`;
  const all = [];
  for (const target of panel.targets) {
    if (filled(target.datasource.uid, values) !== 'prometheus') problem(`${panel.title}: no such data source`);
    const query = filled(target.expr, { ...values, __rate_interval: rate, __interval: `${step}s` });
    const start = Math.floor(range.from.unix() / step) * step;
    const data = target.instant
      ? await prometheus('query', { query, time: range.to.unix() })
      : await prometheus('query_range', { query, start, end: range.to.unix(), step });
    report.panels.push({ title: panel.title, type: panel.type, query, series: data.result.length });
    for (const { metric, value, values: points = [value] } of data.result) {
      const name = target.legendFormat
        ? target.legendFormat.replace(/\{\{ *(\w+) *\}\}/g, (_, label) => metric[label] ?? '') : undefined;
      all.push({ refId: target.refId, metric, fields: [
        { name: 'Time', type: FieldType.time, values: points.map((at) => at[0] * 1000),
          config: { interval: intervalMs } },
        { name: 'Value', type: FieldType.number, values: points.map((at) => Number(at[1])), labels: metric,
          config: { displayNameFromDS: name } },
      ] });
    }
  }
  if (panel.type !== 'table') return all.map((one) => toDataFrame(one));
  const labels = [...new Set(all.flatMap((one) => Object.keys(one.metric)))].sort();
  return [toDataFrame({ fields: [
    { name: 'Time', type: FieldType.time, values: all.map((one) => one.fields[0].values[0]) },
    ...labels.map((name) => ({ name, type: FieldType.string, values: all.map((one) => one.metric[name] ?? '') })),
    { name: 'Value', type: FieldType.number, values: all.map((one) => one.fields[1].values[0]) },
  ] })];
}

// Times at which an annotation's query has a value; Grafana asks in steps of a minute.
async function annotations(list, values, range) {
  const found = [];
  for (const one of list.filter((one) => one.enable)) {
    const query = filled(one.expr, values);
    const { result } = await prometheus('query_range',
      { query, start: Math.ceil(range.from.unix() / 60) * 60, end: range.to.unix(), step: 60 });
    report.annotations.push({ name: one.name, query, series: result.length });
    const color = theme.visualization.getColorByName(one.iconColor);
    result.forEach((series) => series.values.forEach(([at]) => found.push({ at: at * 1000, color })));
  }
  return found;
}
// Grafana's libraries do not draw annotations: here they are dashed lines.
function draw(config, marks) {
  config.addHook('draw', (plot) => marks.forEach(({ at, color }) => {
    const x = plot.valToPos(at, 'x', true);
    Object.assign(plot.ctx, { strokeStyle: color, lineWidth: 2 });
    plot.ctx.setLineDash([5, 5]);
    plot.ctx.beginPath();
    plot.ctx.moveTo(x, plot.bbox.top);
    plot.ctx.lineTo(x, plot.bbox.top + plot.bbox.height);
    plot.ctx.stroke();
    plot.ctx.setLineDash([]);
  }));
  return null;
}

function content({ panel, options, data, fieldConfig, range, marks }, width, height) {
  if (!data.some((frame) => frame.length)) return fieldConfig.defaults.noValue ?? 'No data';
  if (panel.type === 'timeseries') {
    return <TimeSeries frames={data} structureRev={1} timeRange={range} timeZone="utc" width={width} height={height}
      legend={options.legend} options={options}>{(config) => draw(config, marks)}</TimeSeries>;
  }
  if (panel.type === 'table') return (
    <TableNG data={data[0]} width={width} height={height} fieldConfig={fieldConfig} sortBy={options.sortBy} />);
  const get = () => getFieldDisplayValues({ fieldConfig, reduceOptions: options.reduceOptions, theme, data,
    replaceVariables: (text) => text, sparkline: options.graphMode !== 'none', timeZone: 'utc' });
  return <VizRepeater getValues={get} width={width} height={height} source={data} renderCounter={0} autoGrid
    orientation={options.orientation} renderValue={({ value, count, ...size }) => <BigValue {...options} theme={theme}
      value={value.display} sparkline={value.sparkline} count={count} disableWideLayout={!options.wideLayout}
      width={size.width} height={size.height} />} />;
}

// Settings that this page, or Grafana, does not know would have no effect.
function leaves(value, path = '') {
  if (Array.isArray(value) || value === null || typeof value !== 'object') return [path];
  return Object.entries(value).flatMap(([name, one]) => leaves(one, path ? `${path}.${name}` : name));
}
function check(panel, registry) {
  const known = (path) => path.split('.').some((_, n, parts) => registry.getIfExists(parts.slice(0, n + 1).join('.')));
  const set = panel.fieldConfig.overrides.flatMap((rule) => rule.properties);
  for (const path of [...leaves(panel.fieldConfig.defaults), ...set.map((one) => one.id)]) {
    if (!known(path)) problem(`${panel.title}: unknown setting ${path}`);
  }
  const used = [panel.fieldConfig.defaults.unit, ...set.filter((one) => one.id === 'unit').map((one) => one.value)];
  for (const unit of used) if (unit && !units.has(unit)) problem(`${panel.title}: unknown unit ${unit}`);
}

async function main() {
  await initPluginTranslations('ontime');
  const address = new URLSearchParams(location.search);
  const dashboard = await (await fetch('/dashboard.json')).json();
  const raw = { from: address.get('from') ?? dashboard.time.from, to: address.get('to') ?? dashboard.time.to };
  const range = rangeUtil.convertRawToRange(raw, 'utc');
  const values = await variables(dashboard.templating.list);
  const marks = await annotations(dashboard.annotations.list, values, range);
  const column = (innerWidth - 32 + 8) / 24;
  const panels = [];
  for (const panel of dashboard.panels) {
    const { x, y, w, h } = panel.gridPos;
    const box = { left: 16 + x * column, top: 64 + y * 38, width: w * column - 8, height: h * 38 - 8 };
    if (!custom[panel.type]) throw new Error(`${panel.title}: this page does not know panels of type ${panel.type}`);
    const of = plugin(panel.type);
    check(panel, of.fieldConfigRegistry);
    const { options, fieldConfig } = getPanelOptionsWithDefaults(
      { plugin: of, currentOptions: panel.options, currentFieldConfig: panel.fieldConfig, isAfterPluginChange: false });
    const asked = await frames(panel, values, range, Math.floor(box.width), Number(address.get('scrape') ?? 15));
    const shaped = await firstValueFrom(transformDataFrame(panel.transformations ?? [], asked));
    const data = applyFieldOverrides({ data: shaped, fieldConfig, fieldConfigRegistry: of.fieldConfigRegistry, theme,
      replaceVariables: (text) => filled(text, values), timeZone: 'utc' });
    cacheFieldDisplayNames(data);
    panels.push({ panel, options, data, fieldConfig, range, marks, box });
  }
  const bottom = Math.max(...panels.map(({ box }) => box.top + box.height));
  root.render(
    <ThemeContext.Provider value={theme}>
      <GlobalStyles />
      <PanelContextProvider value={{ eventsScope: 'global', eventBus: new EventBusSrv(), sync: () => 0 }}>
        <div style={{ position: 'relative', height: bottom + 16, background: theme.colors.background.canvas }}>
          <div style={{ position: 'absolute', left: 16, right: 16, top: 16, display: 'flex', alignItems: 'center' }}>
            <h4 style={{ margin: '0 24px 4px 0' }}>{dashboard.title}</h4>
            {dashboard.templating.list.map((one) => <InlineField key={one.name} label={one.label ?? one.name}>
              <Input readOnly width={16} value={values[one.name].text} /></InlineField>)}
            <span style={{ marginLeft: 'auto' }}><TimeRangeLabel value={range} timeZone="utc" /></span>
          </div>
          {panels.map((one) => <div key={one.panel.id} style={{ position: 'absolute', ...one.box }}>
            <PanelChrome title={one.panel.title} description={one.panel.description} width={one.box.width}
              height={one.box.height} padding={one.panel.type === 'table' ? 'none' : 'md'}>
              {(width, height) => content(one, width, height)}</PanelChrome></div>)}
        </div>
        <PortalContainer />
      </PanelContextProvider>
    </ThemeContext.Provider>);
  report.height = bottom + 16;
}
// The fonts first: charts do not draw their text again when a font comes.
const root = createRoot(document.getElementById('root'));
root.render(<ThemeContext.Provider value={theme}><GlobalStyles /></ThemeContext.Provider>);
const styled = new Promise((resolve) => { setTimeout(resolve, 500); });
const done = () => { window.report = report; };
styled.then(() => document.fonts.load('12px Inter')).then(main).catch((error) => problem(error.stack)).finally(done);
