#!/usr/bin/env bash
# Builds the documentation as a site in target/docs, with mdBook, which is built into target/tools. Ends with 3 where
# mdBook cannot be built. A test checks the links (crates/ontime/tests/documents.rs).
set -euo pipefail
cd "$(dirname "$0")/.."
version=0.5.4
tools=$PWD/target/tools
pages=target/docs-pages
export PATH=$tools/bin:$PATH

if [ "$(mdbook --version 2> /dev/null)" != "mdbook v$version" ]; then
    echo "docs: building mdBook $version into target/tools"
    mkdir -p "$tools"
    cargo install --quiet --root "$tools" --locked --force --version $version --no-default-features --features search \
        mdbook > "$tools/mdbook.log" 2>&1 || {
        tail -n 20 "$tools/mdbook.log" >&2
        echo "docs: mdBook $version cannot be built: Rust 1.88 and cc are needed (target/tools/mdbook.log)" >&2
        exit 3
    }
fi

# Pages also link to files outside docs, so the source is a copy of docs and of these files in the same layout.
rm -rf $pages target/docs
mkdir -p $pages
cp -r docs ./*.md LICENSE $pages
rm $pages/docs/SUMMARY.md
# mdBook writes README.md as index.html.
find $pages -name '*.md' -exec sed -i 's,](\([^)]*\)README\.md,](\1index.md,g' {} +
{
    printf '# Summary\n\n[Overview](README.md)\n'
    tail -n +2 docs/SUMMARY.md | sed 's,](,](docs/,'
    printf '\n# Project\n\n'
    printf -- '- [%s](%s.md)\n' Architecture ARCHITECTURE Contributing CONTRIBUTING "Reporting a vulnerability" SECURITY Changes CHANGELOG
} > $pages/SUMMARY.md
{
    grep -ohE '\]\(\.\./\.\./[a-z]+/[^)#]*' docs/*/*.md | sed 's,](../../,,'
    grep -ohE '\]\((crates|dra|kernel|lab|packaging|scripts)/[^)#]*' ./*.md | sed 's,](,,'
} | sort -u | while read -r file; do
    install -D -m 644 "$file" "$pages/$file"
done

mdbook build
echo "docs: $PWD/target/docs/index.html"
