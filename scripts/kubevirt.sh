#!/usr/bin/env bash
# Compares the KubeVirt example with the types that KubeVirt publishes for its API: an unknown field, or a value of a
# wrong type, is an error. It does not start the VM. It needs Node.js and npm, and ends with 3 without them.
set -euo pipefail
cd "$(dirname "$0")/.."
for program in node npm; do
    command -v $program > /dev/null ||
        { echo "kubevirt: $program is missing; Debian: apt-get install npm" >&2; exit 3; }
done
tools=$PWD/target/kubevirt
mkdir -p "$tools"
npm install --prefix "$tools" --no-save --no-audit --no-fund --loglevel=error @kubevirt-ui-ext/kubevirt-api@1.7.0 \
    typescript@7.0.2 yaml@2.9.1

takes() { # The manifest in standard input has the fields of a VirtualMachine, with values of their types.
    (
        cd "$tools"
        {
            echo "import type {V1VirtualMachine} from '@kubevirt-ui-ext/kubevirt-api/kubevirt';"
            echo "export const vm: V1VirtualMachine ="
            node -e 'console.log(JSON.stringify(require("yaml").parse(require("fs").readFileSync(0, "utf8"))))'
        } > vm.ts
        npx tsc --noEmit --strict --skipLibCheck --module nodenext --target es2022 vm.ts
    )
}
example=packaging/kubevirt/vm.yaml
takes < $example
for field in runStrategy hugepages autoattachMemBalloon networkName claimName; do
    ! sed "s/$field:/x$field:/" $example | takes > /dev/null || { echo "kubevirt: x$field is not refused" >&2; exit 1; }
done
echo "kubevirt: the example is one of KubeVirt's API"
