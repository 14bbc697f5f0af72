// Checks the licences of the packages, draws the dashboard in Chromium and takes its picture:
// picture.mjs DASHBOARD PROMETHEUS SCRAPE-SECONDS RANGE PICTURE
import { readFileSync } from 'node:fs';
import { join } from 'node:path';
import { chromium } from 'playwright-core';

const [dashboard, prometheus, scrape, range, picture] = process.argv.slice(2);
const problems = [];

// Every package's own licence; none may be under the AGPL. These have no licence in package.json, but in their texts.
const elsewhere = {
  'fast-shallow-equal': 'Unlicense', 'get-document': 'MIT', 'react-universal-interface': 'Unlicense',
};
const licences = {};
for (const path of Object.keys(JSON.parse(readFileSync('node_modules/.package-lock.json')).packages)) {
  const { name, license, licenses } = JSON.parse(readFileSync(join(path, 'package.json')));
  const is = JSON.stringify(license ?? licenses ?? elsewhere[name] ?? 'none').replaceAll('"', '');
  licences[is] = (licences[is] ?? 0) + 1;
  if (/AGPL|GPL-|SSPL|BUSL|none|UNLICENSED|SEE/.test(is)) problems.push(`licence of ${path}: ${is}`);
}
console.log('licences:', Object.entries(licences).map(([name, count]) => `${count} ${name}`).join(', '));

// The browser's requests are answered here: files, and Prometheus's answers. It needs no network.
const types = { html: 'text/html', js: 'text/javascript', css: 'text/css', svg: 'image/svg+xml' };
async function answer(route) {
  const { pathname, search } = new URL(route.request().url());
  if (pathname.startsWith('/api/')) {
    const got = await fetch(`${prometheus}${pathname}${search}`);
    // The page judges Prometheus's refusals by their text.
    return route.fulfill({ status: 200, contentType: 'application/json', body: await got.text() });
  }
  const files = { '/': 'dist/index.html', '/dashboard.json': dashboard, '/favicon.ico': 'dist/index.html' };
  const icon = pathname.match(/^\/public\/(?:build\/)?(img\/.*)/);
  const font = { Regular: 400, Medium: 500 }[pathname.match(/^\/public\/fonts\/inter\/Inter-(\w+)\.woff2$/)?.[1]];
  const file = files[pathname] ?? (font ? `node_modules/@fontsource/inter/files/inter-latin-${font}-normal.woff2`
    : icon ? join('node_modules/@grafana/ui/dist/public', icon[1]) : join('dist', pathname));
  return route.fulfill({ contentType: types[file.split('.').pop()], body: readFileSync(file) });
}
const browser = await chromium.launch({ executablePath: '/usr/bin/chromium', args: ['--no-sandbox'] });
const page = await browser.newPage({ viewport: { width: 1280, height: 1000 } });
page.on('console', (line) => line.type() === 'error' && problems.push(`the page logged: ${line.text()}`));
page.on('pageerror', (error) => problems.push(`the page failed: ${error.stack}`));
await page.route('**/*', (route) => answer(route).catch((error) => {
  problems.push(`${route.request().url()}: ${error.message}`);
  return route.abort();
}));
await page.goto(`http://localhost/?from=now-${range}&to=now&scrape=${scrape}`);
const report = await (await page.waitForFunction(() => window.report, null, { timeout: 60000 })).jsonValue();
// All of the page is in the window: Chromium does not draw a table that is outside.
await page.setViewportSize({ width: 1280, height: Math.ceil(report.height ?? 1000) });
await page.waitForTimeout(2000);
await page.screenshot({ path: picture });
await browser.close();

// No knob is refused here.
const mayBeEmpty = (query) => query.includes('ontime_knob_failures_total');
for (const { title, query, series } of [...report.panels, ...report.annotations]) {
  console.log(`${title ?? 'annotation'}: ${series} series: ${query}`);
  if (!series && !mayBeEmpty(query)) problems.push(`${title ?? 'annotation'} has no data: ${query}`);
}
problems.push(...report.problems);
problems.forEach((text) => console.error(`dashboard: ${text}`));
process.exit(problems.length ? 1 : 0);
